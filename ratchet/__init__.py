"""The console script ``ratchet``, ``ratchet.read`` for notebooks, and the demo."""

from ratchet.console import main, read

__all__ = ["main", "read"]
