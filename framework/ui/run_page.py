"""The page that a run serves, where ``ui.port`` asks for one.

Only then are the libraries of the page loaded, which are an extra.
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
from framework.transactions.status import RunStatus
from framework.ui.sources.core_run import CoreSource
from framework.ui.sources.transactional_run import RunSource


def page_of_run(topology: Topology, config: Config) -> RunPage | None:
    """Serves the page of a transactional topology; None where no page is wanted."""

    def serve(driver: Driver, store: CoordinationStore, status: Callable[[], RunStatus]) -> Callable[[], None]:
        from framework.ui.server import serve_page

        return serve_page(RunSource(topology, driver, store, config, status), config)

    return None if config.ui_port is None else serve


def page_of_core_run(topology: CoreTopology, config: Config) -> CorePage | None:
    """The same for a core topology, which may run without a store."""

    def serve(
        driver: RoundDriver, store: CoordinationStore | None, status: Callable[[], CoreStatus]
    ) -> Callable[[], None]:
        from framework.ui.server import serve_page

        return serve_page(CoreSource(topology, driver, store, config, status), config)

    return None if config.ui_port is None else serve
