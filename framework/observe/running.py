"""A run: a topology in a thread of this process, whatever kind of topology it is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from framework.config import Config

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

R = TypeVar("R", bound="RunningThread")


class RunningThread(ABC):
    """A thread that works until it is done or told to stop, and then ends what it owns. ``_begin`` starts it."""

    def __init__(self, topology_id: str) -> None:
        self._topology_id = topology_id
        self._owned = ExitStack()
        self._thread = threading.Thread(target=self._main, name=f"ratchet-{topology_id}", daemon=True)

    @abstractmethod
    def _work(self) -> None:
        """What the thread does."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Have the thread end soon."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raise what the topology failed with, if it did."""

    @abstractmethod
    def _collector(self) -> Collector:
        """What it shows as metrics. Called only where they are served: their library is loaded then."""

    def _begin(self, config: Config, *owned: Callable[[], object]) -> None:
        """Start the thread. ``owned``: called one after the other when it has ended."""
        if config.metrics_port is not None:
            from framework.observe.metrics import serve_metrics

            self._owned.callback(serve_metrics(self._collector(), config.metrics_host, config.metrics_port))
        for each in reversed(owned):
            self._owned.callback(each)
        self._thread.start()

    def _main(self) -> None:
        with self._owned:
            self._work()

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
