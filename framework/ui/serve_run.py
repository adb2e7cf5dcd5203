"""The page of a run, served if ``ui.port`` is set.

The page's libraries, an optional extra, are imported only if ``ui.port`` is set.
"""

from __future__ import annotations

from collections.abc import Callable

from framework.config import Config
from framework.coordination.store import CoordinationStore
from framework.core.driver import RoundDriver
from framework.core.run import CorePage
from framework.core.status import CoreStatus
from framework.topology import CoreTopology, Topology
from framework.transactions.driver import Driver
from framework.transactions.run import RunPage
from framework.transactions.run_status import RunStatus
from framework.ui.sources.core_run import CoreSource
from framework.ui.sources.transactional_run import RunSource


def page_of_run(topology: Topology, config: Config) -> RunPage | None:
    """Returns a function that serves the page of a transactional topology; None when no page is
    configured.
    """

    def serve(driver: Driver, store: CoordinationStore, status: Callable[[], RunStatus]) -> Callable[[], None]:
        from framework.ui.server import serve_page

        return serve_page(RunSource(topology, driver, store, config, status), config)

    return None if config.ui_port is None else serve


def page_of_core_run(topology: CoreTopology, config: Config) -> CorePage | None:
    """As ``page_of_run``, for a core topology, which may run without a store."""

    def serve(
        driver: RoundDriver, store: CoordinationStore | None, status: Callable[[], CoreStatus]
    ) -> Callable[[], None]:
        from framework.ui.server import serve_page

        return serve_page(CoreSource(topology, driver, store, config, status), config)

    return None if config.ui_port is None else serve
