"""Codecs: they decode the bytes of records into rows."""
