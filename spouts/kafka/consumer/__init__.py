"""Kafka consumers: of exact ranges, for transactional spouts, and of partitions up to their ends,
for the spout of core topologies."""
