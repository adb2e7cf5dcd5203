"""The base of all runs: a topology of either kind in a thread of this process."""

from __future__ import annotations

import html
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from framework.config import Config
from framework.observe.progress_lines import Observed

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

R = TypeVar("R", bound="RunningThread")


class RunningThread(ABC):
    """A thread that works until it is finished or asked to stop, and then closes its resources.
    ``_begin`` starts it."""

    def __init__(self, topology_id: str) -> None:
        self._topology_id = topology_id
        self._owned = ExitStack()
        self._thread = threading.Thread(target=self._main, name=f"ratchet-{topology_id}", daemon=True)

    @abstractmethod
    def _work(self) -> None:
        """The work of the thread."""

    @abstractmethod
    def status(self) -> Observed:
        """The current status of the run."""

    @abstractmethod
    def _rate(self) -> float:
        """Rows done per second, over the last minute."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Make the thread end soon. Returns without waiting."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raise the error with which the topology failed, if it failed."""

    @abstractmethod
    def _collector(self) -> Collector:
        """The collector of the run's metrics. Called only when metrics are served, because it
        imports their library."""

    def _begin(
        self, config: Config, *owned: Callable[[], object], page: Callable[[], Callable[[], None]] | None
    ) -> None:
        """Start the thread. ``owned``: resources to close, in order, after the work has ended or if
        the thread cannot start. ``page``: serves the run's page, and returns a function that ends
        it."""
        with ExitStack() as owning:  # closes all resources if one fails to start
            for each in reversed(owned):
                owning.callback(each)
            if config.metrics_port is not None:
                from framework.observe.metrics_server import health_of, serve_metrics

                owning.callback(
                    serve_metrics(
                        self._collector(),
                        config.metrics_host,
                        config.metrics_port,
                        lambda: health_of(self._topology_id, self.status().phase),
                        config.metrics_allowed_hosts,
                    )
                )
            if page is not None:
                owning.callback(page())
            # the servers end first, because they read the other resources
            self._owned = owning.pop_all()
        self._thread.start()

    def _main(self) -> None:
        with self._owned:
            self._work()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the run: finish the work in progress that must be finished, abandon the rest, and
        end the thread. Nothing is lost. Safe to call twice. Raises ``TimeoutError`` when the thread
        does not end in time."""
        self._request_stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"topology {self._topology_id!r} did not stop within {timeout_s:g} s")

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the run to end. Return True when it has ended and False after ``timeout_s``.
        Raises the error with which the topology failed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._raise_failure()
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._topology_id!r}: {self.status().progress_line(self._rate())}>"

    def _repr_html_(self) -> str:
        """The HTML form of the run in a notebook: one line for each figure."""
        _, _, line = repr(self)[1:-1].partition(": ")
        rows = "".join(f"<tr><td>{html.escape(part)}</td></tr>" for part in line.split(" | "))
        return f"<table><tr><th>{html.escape(self._topology_id)}</th></tr>{rows}</table>"

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
