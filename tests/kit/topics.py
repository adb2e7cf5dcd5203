"""Topics of a test: created, altered, filled, also inside a kafka_txn."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from integration.kafka import answer_of_live_brokers
from tests.kit.oracle import told_of
from tests.kit.waiting import PATIENCE_S, wait_for


class SureProducer(Producer):
    """Says whether everything arrived: ``flush`` only says that nothing is on its way any more."""

    def __init__(self, settings: dict[str, Any]) -> None:
        refused: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                refused.append(error)

        self._refused = refused
        super().__init__({**settings, "on_delivery": delivered})

    def arrived(self, seconds: float = PATIENCE_S) -> None:
        """Wait until everything has arrived.

        Raises ``KafkaException`` when a record was refused.
        """
        left = self.flush(seconds)
        if self._refused:
            raise KafkaException(self._refused[0])
        assert left == 0, f"{left} records have not arrived after {seconds:g} s"


class Topics:
    """Creates and fills topics."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})  # its broker may be killed

    def create(self, topic: str, partitions: int = 1, *, replication: int = 1, **config: str) -> str:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        new = NewTopic(topic, partitions, replication, config=settings)
        answer_of_live_brokers(lambda: self.admin.create_topics([new])[topic])
        told_of(self.admin, {topic: partitions})
        return topic

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until no broker tells of it any more."""
        self.admin.delete_topics([topic], operation_timeout=PATIENCE_S)[topic].result(PATIENCE_S)
        wait_for(lambda: topic not in self.admin.list_topics(timeout=PATIENCE_S).topics, what=f"the end of {topic}")

    def recreate(self, topic: str) -> None:
        """Delete a topic of one partition, wait until it is gone, and create it again."""
        self.delete(topic)

        def created() -> bool:
            try:
                self.create(topic)
            except KafkaException:  # it is still being deleted
                return False
            return True

        wait_for(created)

    def create_placed(self, topic: str, replicas: list[list[int]], **config: str) -> str:
        """``replicas``: partition -> brokers that hold it, its leader first."""
        settings = {key.replace("_", "."): value for key, value in config.items()}
        new = NewTopic(topic, len(replicas), replica_assignment=replicas, config=settings)
        answer_of_live_brokers(lambda: self.admin.create_topics([new])[topic])
        told_of(self.admin, {topic: len(replicas)})
        return topic

    def add_partitions(self, topic: str, up_to: int) -> None:
        answer_of_live_brokers(lambda: self.admin.create_partitions([NewPartitions(topic, up_to)])[topic])
        told_of(self.admin, {topic: up_to})

    def alter(self, topic: str, **config: str) -> None:
        """Change settings of a topic, and wait until the broker says that they hold."""
        changes = [
            ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
        self.admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
        while True:
            found = self.admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)])
            entries = next(iter(found.values())).result(PATIENCE_S)
            if all(entries[each.name].value == each.value for each in changes):
                return

    def producer(self, **settings: Any) -> SureProducer:
        """Idempotent, so that a request sent again neither doubles
        records nor changes their order.
        """
        return SureProducer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "enable.idempotence": True,
                **{key.replace("_", "."): each for key, each in settings.items()},
            }
        )

    def send(self, topic: str, values: Sequence[bytes | None], partition: int = 0) -> None:
        producer = self.producer()
        for value in values:
            producer.produce(topic, value, partition=partition)
            producer.poll(0)
        producer.arrived()

    def send_in_kafka_txn(
        self, topic: str, values: Sequence[bytes], partition: int = 0, *, end: Callable[[Producer], None] | None
    ) -> Producer:
        """Send values inside a kafka_txn; ``end`` None leaves it open, as long as the broker lets
        one be."""
        producer = self.producer(transactional_id=f"x-{uuid.uuid4().hex}", transaction_timeout_ms=900_000)
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=partition)
        producer.arrived()
        if end is not None:
            end(producer)
        return producer
