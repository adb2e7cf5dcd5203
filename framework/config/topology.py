"""``topology.*``: how a topology runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator

from framework.config.secret_redaction import PROVIDER_CONFIG, is_secret
from framework.config.section import Section
from framework.durations import seconds_of
from framework.errors import ConfigError

#: ``topology.max.spout.pending``: its limit for transactions, and its default for the tuples of a
#: core topology.
TRANSACTIONS_PENDING_MAX = 1_000
TUPLES_PENDING = 10_000


class TopologyConfig(Section):
    """Keys of ``topology.*``, most of them Storm's."""

    spout_pending: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None,
        alias="topology.max.spout.pending",
        description="Transactions in flight, 1 by default; of a core topology, pending tuples of each spout task, 10,000 by "
        "default.",
    )
    acker_executors: Annotated[int, Field(ge=0, le=1_000)] = Field(
        1,
        alias="topology.acker.executors",
        description="Acker tasks of a core topology; with 0, tuples are not tracked, and are acked when they are emitted.",
    )
    message_timeout_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] = Field(
        30.0,
        alias="topology.message.timeout.secs",
        description="Seconds an attempt, or a tuple tree of a core topology, may take before it fails and is replayed.",
    )
    start_timeout_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] = Field(
        15.0,
        alias="topology.start.timeout.secs",
        description="Seconds that a first start waits for servers that do not answer: their address may be wrong. Later "
        "starts wait as a running topology does.",
    )
    tick_tuple_freq_secs: Annotated[float, Field(gt=0, le=86_400, strict=False)] | None = Field(
        None,
        alias="topology.tick.tuple.freq.secs",
        description="Seconds between tick tuples for every bolt of a core topology; overridden by tick_s of a bolt. Not set: none.",
    )
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        5,
        alias="topology.max.attempts",
        description="Attempts at one transaction, or recoveries in a row, before the topology stops with the last error.",
    )
    bad_record_errors: bool = Field(
        False,
        alias="topology.bad.record.errors",
        description="Whether a record that causes any error of a bolt is a bad record, after topology.max.attempts "
        "(transactional topologies, where on_bad_record is 'skip' or 'dead_letter').",
    )
    commit_interval_s: Annotated[float, Field(gt=0, le=604_800, strict=False)] | None = Field(
        None,
        alias="topology.commit.interval",
        description="Time between two transactions, in seconds or as a text such as '5 min'. Not set: a transaction begins "
        "as soon as there is a record to read. ratchet set changes it while the topology runs.",
    )
    commit_records_min: Annotated[int, Field(ge=1, le=10**15)] | None = Field(
        None,
        alias="topology.commit.records.min",
        description="Number of unread records that ends topology.commit.interval early. ratchet set changes it.",
    )
    commit_bytes_min: Annotated[int, Field(ge=1, le=10**18)] | None = Field(
        None,
        alias="topology.commit.bytes.min",
        description="Number of unread bytes, estimated from the records read so far, that ends topology.commit.interval "
        "early. ratchet set changes it.",
    )
    rate_records_per_second: Annotated[float, Field(gt=0, le=1e12, strict=False)] | None = Field(
        None,
        alias="topology.rate.records.per.second",
        description="Maximum number of records read per second, over all partitions. Not set: no limit. ratchet set changes it "
        "while the topology runs.",
    )
    open_transactions: Literal["tell", "wait"] = Field(
        "tell",
        alias="topology.open.transactions",
        description="How --until-caught-up, and a spout with end='latest', treat records behind an open Kafka transaction: "
        "tell leaves them out and logs their number as a warning; wait waits until they can be read.",
    )
    changed_schemas: Literal["fail", "accept"] = Field(
        "fail",
        alias="topology.changed.schemas",
        description="What happens when a Schema Registry gives a schema id with another content than before: fail stops the "
        "topology before it commits; accept logs a warning and remembers the new content.",
    )
    idle_poll_max_ms: Annotated[int, Field(ge=1, le=60_000)] = Field(
        100,
        alias="topology.spout.idle.poll.max.ms",
        description="Longest pause between two polls of an idle source, in milliseconds. A source with many partitions is "
        "polled less often, according to the cost of a poll: up to every 2 seconds. A source that reports new records, "
        "as Kafka does, is polled once a second.",
    )
    emit_empty_batches: bool = Field(
        False,
        alias="topology.spout.emit.empty.batches",
        description="Whether an idle source makes empty batches, so that time advances for bolts and sinks.",
    )
    empty_batch_every_ms: Annotated[int, Field(ge=1, le=3_600_000)] = Field(
        500,
        alias="topology.trident.batch.emit.interval.millis",
        description="Milliseconds between two empty batches of an idle source.",
    )
    collapse_records_max: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        20_000,
        alias="topology.collapse.records.max",
        description="Maximum number of records of a batch, or round, that runs as one Spark task; 0 spreads all of them.",
    )
    collapse_resident: bool = Field(
        True,
        alias="topology.collapse.resident",
        description="Whether a Spark task stays for such batches, and keeps its slot; false: each batch is a separate job.",
    )
    history_table: str | None = Field(
        None,
        alias="topology.history.table",
        description="A table that permanently stores the record of each closed transaction: sqlite:PATH, or "
        "postgresql://USER@HOST/DATABASE; #NAME at its end is the name of the table, by default history_ and the id of the "
        "topology. Not set: ZooKeeper stores the last thousand. Give a password as ${NAME} from the environment.",
    )
    state_provider: str = Field(
        "framework.state.InMemoryKeyValueStateProvider",
        alias="topology.state.provider",
        description="The class that stores the state of stateful bolts.",
    )
    state_provider_config: Mapping[str, Any] | str = Field(
        default_factory=dict,
        alias="topology.state.provider.config",
        description="The provider's own settings, as a table or as JSON.",
    )
    checkpoint_interval_ms: Annotated[int, Field(ge=1, le=86_400_000)] = Field(
        1_000,
        alias="topology.state.checkpoint.interval.ms",
        description="Milliseconds between two checkpoints of the state.",
    )
    state_exactly_once: bool = Field(
        True,
        alias="topology.state.exactly.once",
        description="Whether state counts each record once; false gives at-least-once, without going back in the spouts.",
    )

    @field_validator("commit_interval_s", mode="before")
    @classmethod
    def _interval(cls, value: object) -> object:
        return seconds_of(value)

    @field_validator("state_provider_config", mode="before")
    @classmethod
    def _provider_config(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"is not JSON: {error}") from None
        return _wrapped(value)

    @property
    def max_spout_pending(self) -> int:
        """The number of transactions in flight; 1 by default."""
        return 1 if self.spout_pending is None else self.spout_pending

    def check_transactional(self) -> None:
        """Raise ``ConfigError`` for a number of transactions in flight that was probably meant for
        tuples, and for a pace without a condition."""
        if self.max_spout_pending > TRANSACTIONS_PENDING_MAX:
            raise ConfigError(
                f"topology.max.spout.pending is {self.max_spout_pending}: of a transactional topology it counts whole "
                f"transactions, and {TRANSACTIONS_PENDING_MAX} is the most"
            )
        for key, least in (("records", self.commit_records_min), ("bytes", self.commit_bytes_min)):
            if least is not None and self.commit_interval_s is None:
                raise ConfigError(
                    f"topology.commit.{key}.min ends topology.commit.interval early, and no interval is set: set both, or "
                    "neither"
                )

    @property
    def max_tuples_pending(self) -> int:
        """The number of pending tuples of each spout task of a core topology."""
        return TUPLES_PENDING if self.spout_pending is None else self.spout_pending


def gathered_provider_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the keys below ``topology.state.provider.config``, which belong to the provider, in
    one table."""
    gathered = {key: value for key, value in values.items() if not key.startswith(f"{PROVIDER_CONFIG}.")}
    for key, value in values.items():
        if key not in gathered:
            table = gathered.setdefault(PROVIDER_CONFIG, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{PROVIDER_CONFIG} is given as text, and {key} too: give one of them")
            *path, last = key.removeprefix(f"{PROVIDER_CONFIG}.").split(".")
            for each in path:
                table = table.setdefault(each, {})
            table[last] = value
    return gathered


def _wrapped(value: Any, key: str = "") -> Any:
    """Return a table with its secrets wrapped."""
    if isinstance(value, Mapping):
        return {each: _wrapped(item, each) for each, item in value.items()}
    if isinstance(value, list):
        return [_wrapped(each, key) for each in value]
    return SecretStr(value) if isinstance(value, str) and is_secret(key) else value
