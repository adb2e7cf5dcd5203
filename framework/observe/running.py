"""A run: a topology in a thread of this process, whatever kind of topology it is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TypeVar

R = TypeVar("R", bound="RunningThread")


class RunningThread(ABC):
    """The thread that ``body`` runs in, from ``start_thread`` on."""

    def __init__(self, topology_id: str) -> None:
        self._topology_id = topology_id
        self._thread = threading.Thread(target=self._main, name=f"ratchet-{topology_id}", daemon=True)

    @abstractmethod
    def _main(self) -> None:
        """What the thread does, until it is done or told to stop."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Have the thread end soon."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raise what the topology failed with, if it did."""

    def stop(self, timeout_s: float = 30.0) -> None:
        """Finish what is under way and must be finished, abandon the rest, end the thread. Loses nothing; safe to call twice.
        Raises ``TimeoutError``."""
        self._request_stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"topology {self._topology_id!r} did not stop within {timeout_s:g} s")

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the run to end; True when it has. Raises what the topology failed with."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._raise_failure()
        return True

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
