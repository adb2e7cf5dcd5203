"""Ordinary tables of databases, appended to and changed by key."""
