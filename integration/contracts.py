"""The contract suites of all that users may write themselves, in one place. Need pytest.

* ``BackendContract``, of a store of map states (``sinks.MapBackend``): write ``make``.
* ``StateProviderContract``, of a store of stateful bolts (``StateProvider``): write ``provider``.
* ``CodecContract``, of a codec of records (``spouts.Codec``): write ``codec``, ``good``, ``bad``.
* ``PartitionedSpoutContract``, of a source with partitions: write ``spout``.
"""

from framework.state.contract import StateProviderContract
from sinks.contract import BackendContract
from spouts.contract import CodecContract, PartitionedSpoutContract

__all__ = ["BackendContract", "CodecContract", "PartitionedSpoutContract", "StateProviderContract"]
