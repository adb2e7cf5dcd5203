"""The error of a library in Rust that has panicked."""

from __future__ import annotations


class PanicException(BaseException):
    """As every library in Rust has one."""
