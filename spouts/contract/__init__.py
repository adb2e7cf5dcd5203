"""The test suites that every codec and every partitioned spout must pass. Need pytest."""

from spouts.contract.codec import CodecContract
from spouts.contract.spout import PartitionedSpoutContract

__all__ = ["CodecContract", "PartitionedSpoutContract"]
