"""Core topologies: tuples tracked by ackers, rounds, tasks that live across rounds, and checkpoints
of their state."""
