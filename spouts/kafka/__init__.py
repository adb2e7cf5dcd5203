"""Kafka as a source: transactional spouts, and the spout of core topologies."""
