"""The contract suite of backends: what every backend must do. Needs pytest.

::

    class TestMyBackend(BackendContract):
        def make(self, name, key, value):
            return MyBackend(ADDRESS, name, key, value)

``make`` returns an empty backend. ``name`` differs from test to test. The suite uses the backend
itself as the driver does, and pickled copies of it as tasks do.
"""

from __future__ import annotations

from framework.testing.conformance.backend_aggregate_merge import MergeContract
from framework.testing.conformance.backend_call_failures import FaultContract
from framework.testing.conformance.backend_header import HeaderContract
from framework.testing.conformance.backend_previous_values import PreviousValueContract
from framework.testing.conformance.backend_rebuild_exchange import ExchangeContract
from framework.testing.conformance.backend_replay import ReplayContract
from framework.testing.conformance.backend_types import TypeContract


class BackendContract(
    HeaderContract,
    ExchangeContract,
    ReplayContract,
    MergeContract,
    PreviousValueContract,
    FaultContract,
    TypeContract,
):
    """Subclass it and write ``make``."""
