"""Returns freed memory to the system.

glibc keeps freed memory in its heaps. After a large allocation was freed, large allocations come
from the heaps, too, because the threshold for separate mappings rises to 32 MiB. So a process that
reads records of 1 MB keeps its peak of memory, and more, because heaps become fragmented (ADR 129).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

#: Freed memory is returned after this many bytes of rows, if each row has at least this many.
LARGE_BYTES, LARGE_ROW_BYTES = 32 << 20, 16 << 10


class FreedMemory:
    """The freed memory of this process. Threads may use it concurrently."""

    def __init__(self) -> None:
        self._is_much = False

    def note(self, rows: int, size: int) -> None:
        """Note that these rows, which have ``size`` bytes in total, will be freed."""
        if size > max(LARGE_BYTES, LARGE_ROW_BYTES * rows):
            self._is_much = True

    def return_much(self) -> None:
        """If large rows were noted, return freed memory of glibc to the system. Takes up to a tenth
        of a second for each GB. With another library, do nothing."""
        if self._is_much:
            self._is_much = False
            if (trim := _malloc_trim()) is not None:
                trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
