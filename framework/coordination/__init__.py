"""What drivers of both engines share: where state is kept, who leads, and the transactional state."""
