"""Stores of rows, each behind one header: memory, SQLite, PostgreSQL, Redis."""
