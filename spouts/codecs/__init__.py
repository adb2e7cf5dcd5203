"""Codecs: what makes rows of the bytes of a record."""
