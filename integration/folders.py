"""Folders that servers can reach."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that PostgreSQL's user can reach. It cannot reach temporary folders as
    Python and pytest make them."""
    with tempfile.TemporaryDirectory(prefix="ratchet-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
