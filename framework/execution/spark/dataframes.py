"""Spark SQL for ``DataFrameBolt``: turns the rows of a batch into DataFrames, and the results back
into rows.

Rows are passed as Arrow IPC bytes in a binary column, a few values per task, and ``mapInArrow``
unpacks them. So the slow row conversions of ``createDataFrame`` and ``DataFrame.rdd`` handle only
those few values. Adaptive execution is off, so that every attempt has the same number of
partitions, and every task gets the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark import RDD, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BinaryType, StructField, StructType

from framework.arrow_spill import decode_batch, encode_batch
from framework.errors import TopologyError
from framework.execution.failures import FrameFailed, TaskFailure, users_errors
from framework.execution.messages import AttemptHeader
from framework.execution.plan import ExecutionPlan
from framework.execution.spark.spark_context import Spark
from framework.execution.spark.worker_errors import worker_failure
from framework.execution.tasks import PlannedTopology
from framework.topology.bolts import DataFrameBolt
from framework.topology.fields import Fields

_PAYLOAD = StructType([StructField("payload", BinaryType(), False)])
_PAYLOAD_ARROW = pa.schema([pa.field("payload", pa.binary(), nullable=False)])


class SqlFrames:
    """Runs the DataFrame bolts of one topology on a Spark context. Safe to use from several
    threads."""

    def __init__(self, spark: Spark, topology: PlannedTopology) -> None:
        self._spark = spark
        self._topology = topology
        self._sessions = {each: self._session(spark.context, each) for each in frame_bolts(topology.plan)}

    @classmethod
    def in_this_process(cls, topology: PlannedTopology) -> SqlFrames:
        """Use the active context, or start one that ``close`` stops."""
        spark = Spark(f"ratchet {topology.plan.topology_id}", {"spark.master": "local[1]"})
        spark.start()
        return cls(spark, topology)

    def close(self) -> None:
        """Stop the context that ``in_this_process`` started. Call it only on objects made there."""
        self._spark.stop()

    def of_rows(
        self, component_id: str, header: AttemptHeader, inputs: Mapping[str, list[pa.RecordBatch]]
    ) -> Sequence[pa.RecordBatch]:
        """Run a bolt over rows in this process, for the local executor."""
        session = self._sessions[component_id]
        frames = {}
        for name, batches in inputs.items():
            schema = _spark_types(self._fields(component_id, name), component_id, name)
            rows = pa.Table.from_batches([batch.cast(schema[1]) for batch in batches], schema=schema[1])
            frames[name] = session.createDataFrame(rows)
        result = self._result(component_id, header, frames)
        try:
            batches = result.toArrow().to_batches()
        except Exception as error:
            raise FrameFailed(_failure(error, component_id)) from error
        return [batch for batch in batches if batch.num_rows]

    def of_payloads(
        self, component_id: str, header: AttemptHeader, inputs: Mapping[str, RDD[bytes]]
    ) -> RDD[tuple[int, int, bytes]]:
        """Run a bolt over rows on the executors. The result has (partition, sequence, IPC bytes).
        It is computed only when a job needs it."""
        session = self._sessions[component_id]
        frames = {}
        for name, payloads in inputs.items():
            spark_schema, arrow_schema = _spark_types(self._fields(component_id, name), component_id, name)
            packed = session.createDataFrame(payloads.map(_as_row), _PAYLOAD, verifySchema=False)
            frames[name] = packed.mapInArrow(_unpack(arrow_schema), spark_schema)
        result = self._result(component_id, header, frames)
        return result.mapInArrow(_pack, _PAYLOAD).rdd.mapPartitionsWithIndex(_numbered)

    def _result(self, component_id: str, header: AttemptHeader, frames: Mapping[str, DataFrame]) -> DataFrame:
        topology, component = self._topology, self._topology.plan.components[component_id]
        try:
            bolt: DataFrameBolt = topology.instance(component)
            bolt.prepare(topology.conf, topology.context(component, 0), None, header.attempt(component_id, 0))
            result = bolt.execute_dataframes(frames)
            if not isinstance(result, DataFrame):
                raise TopologyError(
                    f"bolt {component_id!r} returned a {type(result).__name__}: execute_dataframe returns a DataFrame"
                )
            declared = component.streams["default"]
            missing = [name for name in declared if name not in result.columns]
            if missing:
                raise TopologyError(
                    f"bolt {component_id!r} declares {', '.join(missing)}, and its DataFrame has {', '.join(result.columns)}"
                )
            return result.select(*(f"`{name}`" for name in declared))
        except users_errors() as error:
            raise FrameFailed(_failure(error, component_id)) from error

    def _fields(self, component_id: str, input_name: str) -> Fields:
        for edge in self._topology.plan.edges:
            if edge.target == component_id and edge.input_name == input_name:
                return self._topology.plan.components[edge.source].streams[edge.stream]
        raise KeyError(input_name)

    def _session(self, context: SparkContext, component_id: str) -> SparkSession:
        """Make a session for one bolt, so that its settings and temporary views are its own. Check
        the bolt's types now rather than in a batch."""
        for name in self._topology.plan.input_names(component_id):
            _spark_types(self._fields(component_id, name), component_id, name)
        session = SparkSession(context).newSession()
        session.conf.set("spark.sql.adaptive.enabled", "false")
        session.conf.set("spark.sql.session.timeZone", "UTC")
        parallelism = self._topology.plan.components[component_id].parallelism
        session.conf.set("spark.sql.shuffle.partitions", str(parallelism))
        return session


def frame_bolts(plan: ExecutionPlan) -> list[str]:
    return [component_id for _, component_id in plan.frame_outputs]


def _failure(error: BaseException, component_id: str) -> TaskFailure:
    """Convert an error of the bolt, or of a function that Spark called for it, into a failure."""
    if isinstance(error, PySparkException):
        failure = worker_failure(error, component_id)
        return failure if failure.where else TaskFailure.of(error, component_id, 0)
    return TaskFailure.of(error, component_id, 0)


def _spark_types(fields: Fields, component_id: str, input_name: str) -> tuple[StructType, pa.Schema]:
    schema = fields.schema()
    try:
        spark_schema = from_arrow_schema(schema)
    except Exception as error:
        raise TopologyError(
            f"bolt {component_id!r}: Spark SQL has no type for a field of {input_name!r} ({fields}): {error}; cast it upstream"
        ) from error
    return spark_schema, to_arrow_schema(spark_schema, timezone="UTC")


# --- in Python workers ----------------------------------------------------------------------------


def _as_row(payload: bytes) -> tuple[bytes]:
    return (payload,)


def _unpack(schema: pa.Schema) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column(0):
                yield decode_batch(payload.as_py()).cast(schema)

    return unpack


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows:
            yield pa.record_batch([pa.array([encode_batch(batch)], pa.binary())], schema=_PAYLOAD_ARROW)


def _numbered(partition: int, rows: Iterator[Any]) -> Iterator[tuple[int, int, bytes]]:
    for sequence, row in enumerate(rows):
        yield partition, sequence, bytes(row[0])
