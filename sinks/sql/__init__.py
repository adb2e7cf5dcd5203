"""Stores with SQL, each behind one header: SQLite and PostgreSQL."""
