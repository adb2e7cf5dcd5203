"""A simulator of transactional topologies: seeded schedules of batches and faults."""
