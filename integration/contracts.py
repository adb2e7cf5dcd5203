"""The contract suites of all that users may write themselves, in one place. Need pytest.

===========================  ================================================  =================
suite                        of                                                you write
===========================  ================================================  =================
``BackendContract``          a store of map states (``sinks.MapBackend``)      ``make``
``StateProviderContract``    a store of stateful bolts (``StateProvider``)     ``provider``
``CodecContract``            a codec of records (``spouts.Codec``)             ``codec``, ``good``
``PartitionedSpoutContract`` a source with partitions                          ``spout``
===========================  ================================================  =================
"""

from framework.state.contract import StateProviderContract
from sinks.contract import BackendContract
from spouts.contract import CodecContract, PartitionedSpoutContract

__all__ = ["BackendContract", "CodecContract", "PartitionedSpoutContract", "StateProviderContract"]
