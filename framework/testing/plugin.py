"""A pytest plugin. In ``conftest.py``: ``pytest_plugins = ["framework.testing.plugin"]``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from framework.testing.simulation.findings import Report
from framework.testing.simulation.simulate import SCHEDULES, simulate


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for a longer search, for instance in a nightly run."""
    group = parser.getgroup("ratchet")
    group.addoption("--simulate-schedules", type=int, default=SCHEDULES, help="Schedules of each simulated topology.")
    group.addoption("--simulate-seed", type=int, default=0, help="The seed of the first one.")


@pytest.fixture(name="simulate")
def fixture(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """``framework.testing.simulate`` with the schedules and the seed from the command line::

    def test_my_topology(simulate):
        simulate(topology(), [{"word": "dog"}, {"word": "cat"}])
    """
    options = request.config
    return partial(
        simulate, schedules=options.getoption("--simulate-schedules"), seed=options.getoption("--simulate-seed")
    )
