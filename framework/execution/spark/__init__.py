"""Batches and rounds as Spark jobs."""
