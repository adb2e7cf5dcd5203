"""``Pipeline`` for users: the compiler of ``framework.streams``, with Kafka and rows in memory as
sources, and ways to run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa

from framework.call_site import Call, called, nearest, without_none
from framework.config import Config, default_address, variable_of
from framework.coordination import CoordinationStore
from framework.errors import ConfigError, RatchetError, TopologyError
from framework.execution.plan import check_pickles
from framework.streams import Pipeline as StreamsPipeline
from framework.streams import Stream
from framework.streams.hidden_columns import is_hidden
from framework.streams.ports import StatefulSteps, Target
from framework.submission import Executor, submit
from framework.testing import Fault, run_on
from framework.topology import HIDDEN, RECORD_FIELDS, TOMBSTONE, Bolt, Fields
from framework.topology.bolts import OnBadRecord
from framework.topology.fields import FieldType
from framework.transactions.run import Run
from framework.user_call_argument_checks import checks_arguments
from ratchet.streams.formats import Bytes, Format, format_of
from ratchet.streams.notebook_tables import RowsTable, Tables
from ratchet.streams.server_addresses import Server
from ratchet.streams.sources import OPTIONS, Kafka, Rows, Topics, check_moment
from ratchet.streams.stateful_steps import StatefulStepsIn
from ratchet.streams.targets import Database, Store, Topic, mysql, postgres, sqlite
from sinks import ExpiringCommitter, Mirror
from sinks.keyed_committer import KeyedCommitter
from spouts import BytesCodec, Codec, DebeziumChanges
from spouts.kafka.record_deserialization import METADATA_TYPES


@checks_arguments
class Pipeline(StreamsPipeline):
    """Reads, computes and writes, exactly once.

    ::

        from ratchet import Json, Pipeline, count, sqlite, sum_

        shop = Pipeline("shop")
        orders = shop.read_kafka("orders", value=Json(order=str, shop=str, cents=int))
        (orders.filter("cents > 0").group_by("shop").agg(orders=count(), cents=sum_("cents"))
               .upsert_into(sqlite("shop.db", "per_shop"), name="per-shop"))

        shop.test({"orders": [{"order": "a", "shop": "x", "cents": 5}]})["per-shop"]

    ``ratchet run module:shop`` runs it. ``state``: a function from a name to the store in which a
    step keeps its state: ``lambda name: sqlite("shop.db", name)``. Steps that use event time need a
    store; by default, it is the database at ``postgres.url`` of the configuration, or else at
    ``mysql.url``.
    """

    def __init__(self, name: str, *, state: Callable[[str], Store] | None = None) -> None:
        super().__init__(name)
        if state is not None and (not callable(state) or isinstance(state, (type, Store))):
            raise called("Pipeline", name).mistake(
                f"state is {_named(state)}: give a function from a name to a store, state=lambda name: sqlite('state.db', name)"
            )
        self._state = state
        self._servers: list[Server] = []

    # --- sources ----------------------------------------------------------------------------------

    def read_kafka(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        value: Format | Codec | None = None,
        key: Format | Codec | None = None,
        headers: Mapping[str, Format | Codec] | None = None,
        metadata: Sequence[str] = (),
        on_bad_record: str | Bolt = "fail",
        name: str | None = None,
        parallelism: int | None = None,
        **options: Any,
    ) -> Stream:
        """The records of a topic, of several with the same columns, or of those whose names match a
        pattern.

        ``value``, ``key``, ``headers``: how bytes become columns, such as ``Json(order=str)``; by
        default the value's bytes. ``metadata``: ``topic``, ``partition``, ``offset``,
        ``timestamp_ms``, ``headers``, ``key``, ``value``, as columns. ``on_bad_record``: "fail",
        "skip" or ``dead_letters(...)``. ``name``: by default the topic's. ``parallelism`` and
        ``options`` (such as ``start``, ``end`` and ``bootstrap_servers``) are those of
        ``spouts.OpaqueKafkaTransactionalSpout``; give them where the first topic is read.
        """
        call = called("read_kafka", *([topics] if topics is not None else []))
        names = _names_of(call, topics, pattern)
        if headers is not None and not isinstance(headers, Mapping):
            raise call.mistake(
                f"headers is {headers!r}: give a format for each, as in headers={{'trace': Text('trace')}}"
            )
        call.check_options(
            options, [*(each for each in inspect.signature(self.read_kafka).parameters if each != "options"), *OPTIONS]
        )
        for bound in ("start", "end"):
            check_moment(call, bound, options.get(bound))
        policy, letters = _policy_of(call, on_bad_record)
        read = Topics(
            name=name or (names[0] if names else "topics"),
            topics=names,
            pattern=pattern,
            value=format_of(call, "value", value if value is not None else BytesCodec()),
            key=format_of(call, "key", key) if key is not None else None,
            headers={header: format_of(call, f"header {header}", each) for header, each in (headers or {}).items()},
            metadata=_metadata_of(call, metadata),
            on_bad_record=policy,
        )
        self._servers += [
            each.server for each in (read.value, read.key, *read.headers.values()) if each and each.server
        ]
        reading = self._kafka(call, options, parallelism, letters)
        schema = read.source.schema
        twice = next((each for each in schema.names if schema.names.count(each) > 1), None)
        if twice is not None:
            raise call.mistake(f"there would be two columns {twice!r}: give one of them another name")
        if self._reading is None or self._reading is reading:
            reading.add(call, read)
        stream = self._read_from(call, reading, read.name, schema)
        try:
            reading.spout({each.name: each.source.schema.names for each in reading.added})
        except RatchetError as error:
            raise call.mistake(error) from None
        return stream

    def _kafka(self, call: Call, options: Mapping[str, Any], parallelism: int | None, letters: Bolt | None) -> Kafka:
        """The source that all topics of the pipeline share. ``options``, ``parallelism`` and
        ``letters``: of one that is added."""
        reading = self._reading
        if not isinstance(reading, Kafka):
            return Kafka(options, 1 if parallelism is None else parallelism, letters)
        if options or parallelism is not None:
            raise call.mistake(
                f"{next(iter(options), 'parallelism')} is for all topics of the pipeline: give it where the first is read"
            )
        if letters is not None and reading.dead_letters is not None:
            raise call.mistake("the pipeline has dead_letters(...) already: they are for all of its topics")
        reading.dead_letters = reading.dead_letters or letters
        return reading

    def mirror(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        into: Database,
        name: str = "mirror",
        named: Callable[[Sequence[str]], str] | None = None,
        unavailable: str = "__debezium_unavailable_value",
        shared_tables: bool = False,
        keep_transactions: bool = False,
        **options: Any,
    ) -> None:
        """Keep a copy of another database, from the topics of its changes, which Debezium writes
        with schemas in the values. A table is created at its first change; with ``pattern``, topics
        that are created while the pipeline runs are read, too. See ``sinks.Mirror``.

        * ``into``: a database, such as ``postgres(dsn, schema="copy")``.
        * ``named``: a function from a table's database, schema and name to the name of its copy; by
          default the name alone.
        * ``unavailable``: the connector's ``unavailable.value.placeholder``.
        * ``shared_tables``: several topics have the changes of one table. Otherwise, the topic with
          the first change of a table owns the table, and a change from another topic is a bad
          record.
        * ``keep_transactions``: readers of the copy see the changes of a transaction of the source
          together. The connector needs ``provide.transaction.metadata=true``, and ``topics`` or
          ``pattern`` includes its topic ``<topic.prefix>.transaction``.
        * ``options``: as in ``read_kafka``."""
        call = called("mirror", *([topics] if topics is not None else []))
        if not isinstance(into, Database):
            raise call.mistake(f"into is {into!r}: give a database, such as postgres(dsn, schema='copy')")
        if keep_transactions:
            options = {**options, "keep_transactions": True}
        changes = self.read_kafka(
            topics, pattern=pattern, value=Bytes("value"), metadata=["key", "topic"], name=f"{name}-changes", **options
        )
        reader = DebeziumChanges(unavailable=unavailable)
        self.note(into)
        copy = Mirror(into.table_of, reader, name=named, shared_tables=shared_tables)
        changes.into(copy, name=name)

    def read(
        self, rows: Iterable[Mapping[str, Any]], *, name: str = "rows", parallelism: int = 1, **types: FieldType
    ) -> Stream:
        """These rows, for tests and notebooks. Without ``types``, the columns are those of the
        rows."""
        call = called("read", "...")
        if hasattr(rows, "to_dicts") or hasattr(rows, "to_dict"):
            raise call.mistake(
                f"it is a {type(rows).__name__}: give mappings, of polars frame.to_dicts(), of pandas frame.to_dict('records')"
            )
        given = [] if isinstance(rows, Mapping) else list(rows)
        wrong: Any = rows if isinstance(rows, Mapping) else next((r for r in given if not isinstance(r, Mapping)), None)
        if wrong is not None:
            raise call.mistake(f"{wrong!r} is a {type(wrong).__name__}: give a list of mappings of columns to values")
        try:
            schema = Fields.of(types).schema() if types else _schema_of(given)
        except (RatchetError, pa.ArrowException, TypeError) as error:
            raise call.mistake(error) from None
        if schema is None or not schema.names:
            raise call.mistake("there are no columns: give rows, or types as in read([], word=str)")
        for row in given:
            unknown = next((each for each in row if each not in schema.names), None)
            if unknown is not None:
                raise call.unknown_column(unknown, schema.names)
            _check_values(call, row, schema)
        return self._read_from(call, Rows(name, given, schema, parallelism), name, schema)

    def topic(self, call: Call, topic: str | None, options: Mapping[str, Any]) -> Target:
        """A topic of Kafka that rows are written to, or several. The brokers are those of
        ``read_kafka``, where ``options`` names no others."""
        servers = self._reading.options.get("bootstrap_servers") if isinstance(self._reading, Kafka) else None
        return Topic(call, topic, {**({"bootstrap_servers": servers} if servers is not None else {}), **options})

    def keep_dead_letters(self, call: Call, committer: Bolt) -> None:
        """Give the spout of the topics the committer of its dead letters."""
        if not isinstance(self._reading, Kafka):
            super().keep_dead_letters(call, committer)
            return
        if self._reading.dead_letters not in (None, committer):
            raise call.mistake(
                "the pipeline has dead_letters(...) already, for all of its topics and sinks: give 'dead_letter' here"
            )
        self._reading.dead_letters = committer

    def stateful_steps(self, call: Call) -> StatefulSteps:
        """The committers that keep a state of their own, in the stores of ``state``."""
        return StatefulStepsIn(self.name, self._state or self._default_state(call), self.note)

    def _default_state(self, call: Call) -> Callable[[str], Store]:
        """The store of the configuration. Without it, the pipeline can only be tested."""
        place = next((each for each in (postgres, mysql) if default_address(f"{each.__name__}.url") is not None), None)
        if place is not None:
            return place
        self._lacking.append(
            call.mistake(
                f"it keeps a state: give the pipeline a store, Pipeline({self.name!r}, state=lambda name: sqlite('state.db', "
                "name)), or set postgres.url in the configuration or RATCHET_POSTGRES_URL in the environment"
            )
        )
        return lambda name: sqlite("state-not-set.db", name)

    def note(self, target: Target) -> None:
        """Take a place that a component writes to, or keeps its state in."""
        super().note(target)
        if isinstance(target, Store) and target.server is not None:
            self._servers.append(target.server)

    def batches(self, *, max_records: int | None = None, max_bytes: int | None = None) -> Self:
        """Limit a transaction to this many records, and about this many bytes."""
        call = called("batches", **without_none(max_records=max_records, max_bytes=max_bytes))
        if max_records is None and max_bytes is None:
            raise call.mistake("give max_records=, max_bytes=, or both")
        if not isinstance(self._reading, Kafka):
            raise call.mistake("say it after read_kafka(...): it is about the topics that are read")
        given = {"batch_records_max": max_records, "batch_bytes_max": max_bytes}
        self._reading.options.update({name: each for name, each in given.items() if each is not None})
        try:
            self._reading.spout({each.name: each.source.schema.names for each in self._reading.added})
        except RatchetError as error:
            raise call.mistake(error) from None
        return self

    # --- running ----------------------------------------------------------------------------------

    def submit(
        self,
        config: Mapping[str, Any] | Config | None = None,
        store: CoordinationStore | None = None,
        executor: Executor = None,
        **options: Any,
    ) -> Run:
        """Start the pipeline and return its run. As ``framework.submit``."""
        checked = Config.of(config or {})
        self._check_addresses(checked)
        return submit(self.build(), checked, store, executor, **options)

    def run(
        self,
        config: Mapping[str, Any] | Config | None = None,
        store: CoordinationStore | None = None,
        executor: Executor = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Run the pipeline until all records that its source holds at the call are committed."""
        with self.submit(config, store, executor, **options) as run:
            run.wait_until_caught_up(timeout_s)

    def test(
        self,
        records: Mapping[str, Iterable[Any]] | None = None,
        *,
        faults: Iterable[Fault] = (),
        take: int | Sequence[int] = 100,
        config: Mapping[str, Any] | Config | None = None,
    ) -> Tables:
        """Run the pipeline over lists, in this process, and return the rows of each sink: name ->
        rows. The committers write to temporary files, and not to your stores.

        * ``records``: source -> rows; by default those of ``read(rows)``. If tombstones delete
          rows, ``{"id": "a", "tombstone": True}`` is a tombstone. If event time uses a topic's
          partitions or timestamps, rows may also have ``topic``, ``partition`` and
          ``timestamp_ms``; by default, their partition is 0.
        * ``faults``: as in ``framework.testing``.
        * ``take``: the rows in a batch; or the rows in each of the first batches, the last number
          for all further batches.

        A row that a step or a sink refuses is left out as ``on_bad_record`` says, but never becomes
        a dead letter, because it is not a record of a topic."""
        struck = [faults] if isinstance(faults, Fault) else list(faults)
        other = next((each for each in struck if not isinstance(each, Fault)), None)
        if other is not None:
            raise called("test", "...").mistake(f"{other!r} is no fault: give crash(2), fail_attempt(2) or replay()")
        topology = self._topology()
        check_pickles(topology)
        fields = {source: topology.spout.streams[stream] for source, stream in self._streams_read().items()}
        given = self._given(records, fields)
        of_topic = isinstance(self._reading, Kafka)
        rows = {
            source: [_fitting(row, fields[source], of_topic=of_topic) for row in its] for source, its in given.items()
        }
        if not any(rows.values()):
            return Tables({each.id: RowsTable([]) for each in self._sinks()})
        streams = self._streams_read()
        several = len(streams) > 1
        sample: Any = {streams[source]: its for source, its in rows.items()} if several else next(iter(rows.values()))
        done = run_on(topology, sample, faults=struck, take=take, config=config)
        found: dict[str, RowsTable] = {}
        for each in self._sinks():
            if isinstance(each.bolt, KeyedCommitter) and not isinstance(each.bolt, ExpiringCommitter):
                rows_of_sink = done.rows(each.id)
            elif done.has_table(each.id):
                rows_of_sink = done.table(each.id)
            else:
                rows_of_sink = [
                    row for sub in topology[each.id].subscriptions for row in done.rows(sub.component_id, sub.stream)
                ]
            found[each.id] = RowsTable(
                [{name: value for name, value in row.items() if not is_hidden(name)} for row in rows_of_sink]
            )
        return Tables(found)

    def show(self, rows: int = 5, records: Mapping[str, Iterable[Any]] | None = None) -> Tables:
        """The first rows of each sink, as in ``test``."""
        if records is None and isinstance(self._reading, Kafka):
            raise called("show", rows).mistake(f"give rows, as in show({rows}, {_rows_of(self._reading.streams())})")
        return self.test(records).head(rows)

    def _check_addresses(self, config: Config) -> None:
        """Raise ``ConfigError`` for an address that is set after the places that need it were
        made."""
        given = config.addresses()
        for server in self._servers:
            if server.key in given and given[server.key] != server.address:
                raise ConfigError(
                    f"{server.key} comes too late, because the places of pipeline {self.name!r} took their addresses before: set "
                    f"{variable_of(server.key)}, or name the address in each place"
                )

    def _sinks(self) -> list[Any]:
        """Committers, and bolts without subscribers."""
        placed = [each for each in self._placed if not each.takes_clock]
        return [each for each in placed if hasattr(each.bolt, "finish_batch") or not each.schema.names]

    def _streams_read(self) -> Mapping[str, str]:
        return self._reading.streams() if self._reading is not None else {}

    def _given(self, records: Mapping[str, Iterable[Any]] | None, fields: Mapping[str, Fields]) -> dict[str, list[Any]]:
        """The rows of each source. They may have the columns that its spout adds to ``fields``."""
        call = called("test", "...")
        schemas = {each.source: each.schema for each in self._sources}
        if records is None:
            if not isinstance(self._reading, Rows):
                raise call.mistake(f"give rows, as in {_example(schemas)}")
            return {self._reading.spout_id: list(self._reading.rows)}
        if not isinstance(records, Mapping):
            raise call.mistake(
                f"the rows are a {type(records).__name__}: give them by source, as in {_example(schemas)}"
            )
        given = {}
        for source, rows in records.items():
            if source not in schemas:
                raise call.mistake(f"the pipeline does not read {source!r}{nearest(source, schemas)}")
            if isinstance(rows, Mapping) or hasattr(rows, "to_dict"):
                raise call.mistake(
                    f"the rows of {source!r} are a {type(rows).__name__}: give a list of mappings of columns to values"
                )
            given[source] = list(rows)
            reading = self._reading
            metadata = reading.metadata(source) if isinstance(reading, Kafka) else {}
            added = [metadata.get(each, each) for each in fields[source] if each not in schemas[source].names]
            names = list(dict.fromkeys([*schemas[source].names, *(each for each in added if not is_hidden(each))]))
            for row in given[source]:
                if not isinstance(row, Mapping):
                    raise call.mistake(f"{row!r} is a {type(row).__name__}: give mappings of columns to values")
                unknown = next((each for each in row if each not in names), None)
                if unknown is not None:
                    raise call.unknown_column(unknown, names)
                _check_values(call, row, schemas[source])
            hidden = {each: metadata.get(each) for each in fields[source] if each in RECORD_FIELDS}
            if hidden:
                given[source] = [{**row, **_record_of(call, source, row, hidden)} for row in given[source]]
        return given


def _schema_of(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The types that Arrow finds for each column. Raises ``TopologyError``."""
    fields = []
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            fields.append(pa.field(name, pa.array([row.get(name) for row in rows]).type))
        except (pa.ArrowException, TypeError) as error:
            raise TopologyError(f"the values of {name!r} have no type in common: {error}") from None
    return pa.schema(fields)


def _names_of(call: Call, topics: Any, pattern: str | None) -> tuple[str, ...]:
    """The names of the topics; none with a pattern."""
    given = (topics,) if isinstance(topics, str) or not isinstance(topics, Iterable) else topics
    names = tuple(given) if topics is not None else ()
    if not all(isinstance(each, str) for each in names):
        raise call.mistake("give the name of a topic, or a list of names")
    if bool(names) == (pattern is not None):
        raise call.mistake("name a topic, or give pattern=, one of the two")
    return names


def _metadata_of(call: Call, metadata: Sequence[str]) -> tuple[str, ...]:
    names = (metadata,) if isinstance(metadata, str) else tuple(metadata)
    for each in names:
        if each not in METADATA_TYPES:
            raise call.mistake(f"there is no metadata {each!r}{nearest(each, METADATA_TYPES)}")
    return names


def _policy_of(call: Call, on_bad_record: str | Bolt) -> tuple[OnBadRecord, Bolt | None]:
    """The policy for bad records, and the committer of dead letters."""
    if isinstance(on_bad_record, Bolt):
        return "dead_letter", on_bad_record
    if on_bad_record == "fail":
        return "fail", None
    if on_bad_record == "skip":
        return "skip", None
    raise call.mistake(f"on_bad_record is {_named(on_bad_record)}: give 'fail', 'skip' or dead_letters(...)")


def _named(given: object) -> str:
    """A value in the form for messages."""
    return str(given) if isinstance(given, Store) else repr(given)


def _example(sources: Iterable[str]) -> str:
    return f"test({_rows_of(sources)})"


def _rows_of(sources: Iterable[str]) -> str:
    return f"{{{next(iter(sources))!r}: [...]}}"


def _check_values(call: Call, row: Mapping[str, Any], schema: pa.Schema) -> None:
    """Raise ``TopologyError`` for values that Arrow would convert: a number in a column of times, a
    fraction in a column of integers, and text in a column of numbers."""
    for name, value in row.items():
        if name not in schema.names or isinstance(value, bool):
            continue
        kind, types = schema.field(name).type, pa.types
        if types.is_temporal(kind) and isinstance(value, int | float):
            raise call.mistake(
                f"{name!r} is {value!r}, and a number of a time has no unit: give a datetime, or the text of one"
            )
        if types.is_integer(kind) and isinstance(value, float) and not value.is_integer():
            raise call.mistake(f"{name!r} is {value!r}, which is no value of {kind}")
        if isinstance(value, str) and (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise call.mistake(f"{name!r} is the text {value!r}, which is no value of {kind}")


def _record_of(call: Call, source: str, row: Mapping[str, Any], hidden: Mapping[str, str | None]) -> Mapping[str, Any]:
    """The hidden columns of a row of a topic. ``hidden``: their names -> the row's names for them;
    None if the value has a column of that name."""
    own: dict[str, Any] = {f"{HIDDEN}topic": source, f"{HIDDEN}partition": 0, f"{HIDDEN}timestamp_ms": 0}
    known = {"topic": source, "partition": 0, **row}
    lacking = next((name for name in hidden.values() if name is not None and name not in known), None)
    if lacking is not None:
        raise call.mistake(f"event time goes by the time of the record: give the rows of {source!r} a {lacking!r}")
    return {each: known[name] if name is not None else own[each] for each, name in hidden.items()}


def _fitting(row: Mapping[str, Any], fields: Fields, *, of_topic: bool) -> dict[str, Any]:
    """The columns that the spout emits. A column that a row lacks is null, as in JSON. A row of a
    topic without the column of tombstones is not a tombstone."""
    missing = {TOMBSTONE: False} if of_topic else {}
    return {name: row.get(name, missing.get(name)) for name in fields}
