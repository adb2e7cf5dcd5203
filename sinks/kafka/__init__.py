"""Kafka as a sink: rows as records, each once."""
