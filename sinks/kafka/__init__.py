"""Kafka as a sink: each row becomes one record."""
