"""The contract suites of all that users may write themselves, in one place. Need pytest.

* ``BackendContract``, of a store of map states (``sinks.MapBackend``): write ``make``.
* ``StateProviderContract``, of a store of stateful bolts (``StateProvider``): write ``provider``.
* ``CodecContract``, of a codec of records (``spouts.Codec``): write ``codec``, ``good``, ``bad``.
* ``PartitionedSpoutContract``, of a source with partitions: write ``spout``.
"""

from framework.testing.conformance.backend import BackendContract
from framework.testing.conformance.codec import CodecContract
from framework.testing.conformance.spout import PartitionedSpoutContract
from framework.testing.conformance.state_provider import StateProviderContract

__all__ = ["BackendContract", "CodecContract", "PartitionedSpoutContract", "StateProviderContract"]
