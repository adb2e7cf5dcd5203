"""Consumers of Kafka: exact ranges for transactional spouts, and partitions up to their ends for
the spout of core topologies."""
