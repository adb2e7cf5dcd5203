"""Core topologies: tuples with ackers, rounds, tasks that live from round to round, and checkpoints
of their state."""
