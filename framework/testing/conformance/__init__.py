"""The contract suites of all interfaces that users may implement, in one place. They need pytest.

* ``BackendContract``, for a store of map states (``sinks.MapBackend``): write ``make``.
* ``StateProviderContract``, for a store of stateful bolts (``StateProvider``): write ``provider``.
* ``CodecContract``, for a codec of records (``spouts.Codec``): write ``codec``, ``good``, ``bad``.
* ``PartitionedSpoutContract``, for a source with partitions: write ``spout``.
"""

from framework.testing.conformance.backend import BackendContract
from framework.testing.conformance.codec import CodecContract
from framework.testing.conformance.spout import PartitionedSpoutContract
from framework.testing.conformance.state_provider import StateProviderContract

__all__ = ["BackendContract", "CodecContract", "PartitionedSpoutContract", "StateProviderContract"]
