"""A pipeline: what is read, the components that its streams lead to, and the topology of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pyarrow as pa

from framework.call_site import Call, called
from framework.durations import Duration, micros_above_0
from framework.errors import ConfigError, RatchetError, TopologyError
from framework.streams.description import described, described_html
from framework.streams.hidden_columns import PLACE, TIMESTAMP, check_new_names, hidden_of, visible, with_carried
from framework.streams.plan import (
    BeforeWindows,
    Node,
    Placed,
    Read,
    SideOutput,
    builder_of,
    carried_in,
    carries_tombstones,
    check_sequence,
    closed_once,
    emitter_of,
    name_of,
    sides_of,
    ways_to,
)
from framework.streams.ports import GivenSpout, Reading, StatefulSteps, Target
from framework.streams.stream import Stream
from framework.streams.unknown_operator_hints import of_pipeline
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import (
    DEFAULT_STREAM,
    TOMBSTONE,
    Bolt,
    Fields,
    Input,
    OutputFieldsDeclarer,
    Spout,
    Topology,
    TransactionalTopologyBuilder,
)
from framework.topology.builder import TopologyMaker
from framework.topology.graph import checked_parallelism, valid_id
from framework.topology.groupings import AllGrouping, GlobalGrouping
from framework.topology.planning_time_stream import CLOCK_FIELDS, CLOCK_STREAM
from framework.user_call_argument_checks import checks_arguments


@checks_arguments
class Pipeline(TopologyMaker):
    """Streams that begin at what is read and end in sinks. ``build()`` makes a ``Topology`` of
    them, called ``name``: a pipeline of the same name continues where the last run stopped."""

    def __init__(self, name: str) -> None:
        try:
            self.name = valid_id("pipeline", name)
        except TopologyError as error:
            raise called("Pipeline", name).mistake(error) from None
        self._reading: Reading | None = None
        self._sources: list[Read] = []
        self._placed: list[Placed] = []
        #: Rows after a step that follows windows -> the same before the windows, as far as known.
        self.before_windows: dict[Node, BeforeWindows | None] = {}
        self._builder: TransactionalTopologyBuilder | None = None
        self._settings: dict[str, Any] = {}
        self._lacking: list[TopologyError] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise of_pipeline(self, name, [each for each in dir(Stream) if not each.startswith("_")])

    # --- sources ----------------------------------------------------------------------------------

    def spout(self, spout: Spout, *, name: str = "spout", parallelism: int = 1) -> Stream:
        """The rows of a spout of your own, of its default stream."""
        call = called("spout", type(spout).__name__)
        if not isinstance(spout, Spout):
            raise call.mistake(f"{spout!r} is a {type(spout).__name__}: give a spout")
        declarer = OutputFieldsDeclarer(name)
        try:
            spout.declare_output_fields(declarer)
        except RatchetError as error:
            raise call.mistake(error) from None
        if DEFAULT_STREAM not in declarer.streams:
            raise call.mistake(f"the spout has no default stream (its streams: {', '.join(declarer.streams)})")
        schema = declarer.streams[DEFAULT_STREAM].schema()
        if schema is None:
            raise call.mistake("the spout has fields without a type: declare them, as in Fields(word=str)")
        return self._read_from(call, GivenSpout(spout, name, parallelism), name, schema)

    def _read_from(self, call: Call, reading: Reading, source: str, schema: pa.Schema) -> Stream:
        """The stream of the only source, or of one more source of the same ``reading``."""
        self.check_open(call)
        if self._reading is not None and self._reading is not reading:
            raise call.mistake("the pipeline reads something already: a pipeline has one spout")
        try:
            valid_id("source", source)
            checked_parallelism(reading.spout_id, reading.parallelism)
        except TopologyError as error:
            raise call.mistake(error) from None
        check_new_names(call, schema.names)
        self._reading = reading
        node = Read(source, schema)
        self._sources.append(node)
        return Stream(self, node)

    # --- pace -------------------------------------------------------------------------------------

    def every(self, interval: Duration) -> Self:
        """Commit once in this interval, as with ``topology.commit.interval``. The configuration and
        ``ratchet set`` take precedence."""
        call = called("every", interval)
        try:
            self._settings["topology.commit.interval"] = micros_above_0(interval, "the interval") / 1_000_000
        except ConfigError as error:
            raise call.mistake(error) from None
        return self

    def at_most(self, records: float, *, per: Duration = "1 s") -> Self:
        """Read at most ``records`` in each ``per``, as with ``topology.rate.records.per.second``.
        The configuration and ``ratchet set`` take precedence."""
        call = called("at_most", records, per=per)
        try:
            seconds = micros_above_0(f"1 {per}" if isinstance(per, str) and per.isalpha() else per, "per") / 1_000_000
            if isinstance(records, bool) or not isinstance(records, (int, float)) or not records > 0:
                raise ConfigError(f"{records!r} records: give a number above 0")
        except ConfigError as error:
            raise call.mistake(error) from None
        self._settings["topology.rate.records.per.second"] = records / seconds
        return self

    # --- what the streams of this pipeline call ---------------------------------------------------

    def check_open(self, call: Call) -> None:
        """Raise ``TopologyError`` once the builder was handed out."""
        if self._builder is not None:
            raise call.mistake("pipeline.builder was taken, so the pipeline is complete: add bolts to the builder")

    def topic(self, call: Call, topic: str | None, options: Mapping[str, Any]) -> Target:
        """A topic of Kafka that rows are written to; None where each row names its own."""
        raise call.mistake("this pipeline knows no Kafka: use the Pipeline of ratchet")

    def note(self, target: Target) -> None:
        """Note a place that a component writes to, or keeps its state in."""
        if target.lacks is not None:
            self._lacking.append(target.lacks)

    def set_policy(self, call: Call, bolt: Bolt, policy: str | Bolt) -> None:
        """Tell a bolt what becomes of a record whose value it refuses."""
        if isinstance(policy, Bolt):
            self.keep_dead_letters(call, policy)
            policy = "dead_letter"
        if policy not in ("fail", "skip", "dead_letter"):
            raise call.mistake(f"on_bad_record is {policy!r}: give 'fail', 'skip' or dead_letters(...)")
        bolt.on_bad_record = policy  # type: ignore[assignment]

    def keep_dead_letters(self, call: Call, committer: Bolt) -> None:
        """Give the spout the committer of its dead letters."""
        raise call.mistake("only the records of topics become dead letters: give 'fail' or 'skip'")

    def place(self, placed: Placed) -> Placed:
        """Take a component whose bolt is checked against the rows that it gets."""
        self.check_open(placed.call)
        self._check_name(placed.call, placed.id)
        try:
            checked_parallelism(placed.id, placed.parallelism)
        except TopologyError as error:
            raise placed.call.mistake(error) from None
        declarer = OutputFieldsDeclarer(placed.id)
        try:
            inputs = [
                Input(
                    ", ".join(dict.fromkeys(name_of(way[0]) for way in ways_to(each))),
                    DEFAULT_STREAM,
                    Fields.of_schema(
                        with_carried(
                            _with_tombstones(each.schema) if each is placed.deletes else each.schema, placed.hidden
                        )
                    ),
                    placed.grouping,
                )
                for each in sides_of(placed.above)
            ]
            placed.bolt.bind(placed.id, [*inputs, *self._hidden_inputs(placed)], placed.parallelism)
            placed.bolt.declare_output_fields(declarer)
        except RatchetError as error:
            raise placed.call.mistake(error) from None
        schemas = {stream: fields.schema() or pa.schema([]) for stream, fields in declarer.streams.items()}
        seen = {stream: visible(schema) for stream, schema in schemas.items()}
        complete = replace(
            placed,
            schema=seen.pop(DEFAULT_STREAM, pa.schema([])),
            side_schemas=seen,
            made_hidden={stream: frozenset(hidden_of(schema.names)) for stream, schema in schemas.items()},
        )
        self._placed.append(complete)
        return complete

    def _check_name(self, call: Call, name: str) -> None:
        try:
            valid_id("bolt", name)
        except TopologyError as error:
            raise call.mistake(error) from None
        if self._reading is not None and name == self._reading.spout_id:
            raise call.mistake(f"the name {name!r} is that of what is read already: give another name=")
        taken = next((each for each in self._placed if each.id == name), None)
        if taken is not None:
            raise call.mistake(f"the name {name!r} is that of {taken.call} already: give another name=")

    def carries_tombstones(self, call: Call, node: Node, keys: Iterable[str]) -> bool:
        """Whether a table of these rows deletes the one of a tombstone's keys."""
        return self._reading is not None and carries_tombstones(call, self._reading, node, frozenset(keys))

    def check_sequence(self, call: Call, node: Node, keys: Iterable[str], sequence: str) -> None:
        """Raise ``TopologyError`` if tombstones have the keys of a table of these rows, but not its
        sequence."""
        if self._reading is not None:
            check_sequence(call, self._reading, node, frozenset(keys), sequence)

    def stateful_steps(self, call: Call) -> StatefulSteps:
        """The committers that keep a state of their own."""
        raise call.mistake("this pipeline has no steps with a state: use the Pipeline of ratchet")

    @property
    def partition(self) -> tuple[str, ...]:
        """The columns that name the partition of the source that a row is from."""
        return self._reading.partition if self._reading is not None else ()

    def place_of(self, *rows: Node) -> tuple[str, ...] | None:
        """The columns that name the source partition of each of these rows: columns that the user
        asked for, or hidden columns. None if the rows have no such columns."""
        if all(set(self.partition) <= set(each.schema.names) for each in rows):
            return self.partition
        return PLACE if all(self.carries(each, PLACE) for each in rows) else None

    def left_out_of_joins(self, rows: Node) -> tuple[str, ...]:
        """The columns of topic and partition, which joined rows do not have."""
        asked = self._reading.asked if self._reading is not None else frozenset()
        is_place = set(self.partition) <= set(rows.schema.names)
        return tuple(each for each in self.partition if is_place or each in asked)

    def carries(self, rows: Node, names: Iterable[str]) -> bool:
        """Whether rows can have these hidden columns."""
        return self._reading is not None and carried_in(self._reading, rows).issuperset(names)

    def check_timestamps(self, call: Call, rows: Node, option: str) -> None:
        """Raise ``TopologyError`` for rows that do not have the time of a record."""
        if not self.carries(rows, [TIMESTAMP]):
            raise call.mistake(
                f"its rows have no timestamp of a record of a topic: say which column is the time, as in {option}='at'"
            )

    def without_partition(self, above: Node) -> str:
        """The mistake of a step by event time whose rows do not name their partition."""
        steps = [way[0] for way in ways_to(above) if isinstance(way[0], (Placed, SideOutput))]
        made = next((emitter_of(each) for each in steps if self.place_of(each) is None), None)
        if made is not None:
            again = "put them into windows without on=, " if made.closes else ""
            return (
                f"event time goes by partition, and the rows of {made.call} are from several: join them with a table without "
                f"times=, {again}upsert them, or write them to a topic and read that in a second pipeline"
            )
        remade = [step.step.call for _, way in ways_to(above) for step in way if not step.step.carries]
        return (
            f"event time goes by partition, and {remade[0] if remade else 'a step'} makes rows of several: "
            f"read_kafka(..., metadata={list(self.partition)!r}), and keep these columns"
        )

    def watermarks(self, call: Call, name: str, above: Node, *, on: str, bounds: WatermarkBounds) -> tuple[Placed, ...]:
        """The watermarks of the step ``name`` over these rows. Raises ``TopologyError`` if the rows
        have no event time."""
        closed = closed_once(call, above, on)
        timed = (above, on) if closed is None else None
        return self.watermarks_of(call, name, timed, [closed] if closed is not None else [], bounds)

    def watermarks_of(
        self,
        call: Call,
        name: str,
        timed: tuple[Node, str] | None,
        closed: Sequence[Placed],
        bounds: WatermarkBounds,
    ) -> tuple[Placed, ...]:
        """The watermarks of the step ``name``: its own, for rows with a time, and those of closed
        windows. Raises ``TopologyError`` if the rows have no event time, and for bounds if all rows
        are closed windows."""
        followed = dict.fromkeys(each for its in closed for each in its.watermarks)
        if timed is not None:
            above, on = timed
            return (self._own_watermark(call, name, above, on=on, bounds=bounds), *followed)
        self._check_never_late(call, closed[0], bounds)
        return tuple(followed)

    def _own_watermark(self, call: Call, name: str, above: Node, *, on: str, bounds: WatermarkBounds) -> Placed:
        """The watermark of these rows, for the step ``name`` alone. Its id and its state depend on
        that name only, and not on other steps."""
        self._check_name(call, name)
        partition = self.place_of(above)
        if partition is None:
            raise call.mistake(self.without_partition(above))
        try:
            bolt = self.stateful_steps(call).watermark(f"{name}-watermark", on, partition, bounds)
        except ConfigError as error:
            raise call.mistake(error) from None
        if bounds.advance_when_idle:
            self._settings["topology.spout.emit.empty.batches"] = True
        return self.place(
            Placed(
                id=f"{name}-watermark",
                above=above,
                bolt=bolt,
                grouping=GlobalGrouping(),
                parallelism=1,
                call=call,
                uses=(on, *partition),
                hidden=frozenset(hidden_of([on, *partition])),
                takes_clock=True,
            )
        )

    def _check_never_late(self, call: Call, closed: Placed, bounds: WatermarkBounds) -> None:
        """Raise ``TopologyError`` for bounds of closed windows. These use the watermark that has
        closed them, which passes the end of a window in the transaction that sends the window."""
        if bounds.micros() != WatermarkBounds().micros():
            raise call.mistake(
                "closed windows are never late: leave late, max_ahead, idle_after and advance_when_idle out, and give them "
                f"where {closed.call} puts rows into windows"
            )

    def _hidden_inputs(self, placed: Placed) -> list[Input]:
        inputs = []
        if placed.takes_clock and self._reading is not None:
            inputs.append(Input(self._reading.spout_id, CLOCK_STREAM, CLOCK_FIELDS, GlobalGrouping()))
        for each in placed.watermarks:
            inputs.append(Input(each.id, DEFAULT_STREAM, Fields.of_schema(each.schema), AllGrouping()))
        return inputs

    # --- what it becomes --------------------------------------------------------------------------

    @property
    def builder(self) -> TransactionalTopologyBuilder:
        """The builder of the topology, for bolts that no operator makes. The pipeline is complete
        then. All columns are kept, because such a bolt may take any of them."""
        self._check_complete()
        if self._builder is None:
            self._builder = self._compiled(prune=False)
        return self._builder

    def build(self) -> Topology:
        """The topology. Raises ``TopologyError`` naming what is wrong."""
        self._check_complete()
        return self._topology()

    def _check_complete(self) -> None:
        if self._lacking:
            raise self._lacking[0]

    def _topology(self) -> Topology:
        """The topology, which may lack addresses."""
        builder = self._builder or self._compiled(prune=True)
        try:
            return replace(builder.build(), settings=dict(self._settings))
        except TopologyError as error:
            raise self._mistake_of(error) from None

    def describe(self) -> str:
        """What the pipeline becomes: each component with its tasks, inputs, groupings, columns and
        guarantees."""
        return described(self._topology())

    def _repr_html_(self) -> str:
        try:
            return described_html(self._topology())
        except RatchetError as error:
            return described_html(error)

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}: {len(self._sources)} sources, {len(self._placed)} bolts)"

    def _compiled(self, *, prune: bool) -> TransactionalTopologyBuilder:
        if self._reading is None:
            raise TopologyError(f"pipeline {self.name!r} reads nothing: begin with read_kafka(...) or read(rows)")
        if not self._placed:
            raise TopologyError(
                f"pipeline {self.name!r} writes nothing: end a stream with append_into(...), upsert_into(...) or into(...)"
            )
        return builder_of(self.name, self._reading, self._placed, self._sources, prune=prune)

    def _mistake_of(self, error: TopologyError) -> TopologyError:
        """An error about a component, as an error of the operator that made the component."""
        named = [each for each in self._placed if f"{each.id!r}" in str(error)]
        if not named or any(str(error).startswith(f"{each.call}: ") for each in self._placed):
            return error
        return named[-1].call.mistake(error)


def _with_tombstones(schema: pa.Schema) -> pa.Schema:
    return schema if TOMBSTONE in schema.names else schema.append(pa.field(TOMBSTONE, pa.bool_()))
