"""What a Kafka spout reads: topics, where reading begins and ends."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from spouts.kafka.start_end_options import EARLIEST, Bounds


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """The topics, and where the first batch of a new topology starts. ``skips_lost_data``: the user
    chose ``on_data_loss="skip"``. ``waits_for_leaders``: a batch of an idempotent spout waits for
    every partition; an opaque one leaves out those without a leader. ``read_first``: topics that a
    new topology reads to their ends, as they are then, before the others. ``start_group``: the
    consumer group whose committed offsets a new topology begins at; partitions without one begin at
    ``start``. ``end``: where reading ends; None: it does not. ``waits_for_open``: the end of a log
    includes the records behind an open kafka_txn. ``keeps_transactions``: a batch has all changes
    of a transaction of the source, or none."""

    topics: tuple[str, ...]
    pattern: str | None
    start: Bounds
    skips_lost_data: bool
    waits_for_leaders: bool
    _: KW_ONLY
    read_first: tuple[str, ...] = ()
    start_group: str | None = None
    end: Bounds | None = None
    waits_for_open: bool = False
    keeps_transactions: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a new topology begins at the beginnings."""
        return self.start == EARLIEST and self.start_group is None
