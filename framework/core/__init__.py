"""Core topologies: tuples with ackers, rounds, tasks that live, checkpoints of their state."""
