"""Planning of batches of Kafka offsets, on the driver."""
