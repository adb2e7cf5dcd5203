"""The two workloads, W1 (throughput) and W2 (latency), on the embedded servers: ``make bench``."""
