//! A consumer that reads ranges of partitions into columns, without a Python object per record.
//!
//! Every partition has a queue of its own in librdkafka. So a range takes what belongs to it, and
//! what was fetched beyond its end stays where it is, for the next range. The rules of a range
//! (when it is complete, what an event means) are in Python, in `spouts/kafka/consumer/native_range_consumer.py`;
//! here is only what is done for every record.
//!
//! No method holds the interpreter while it waits or copies. There is no `unsafe` in this file.

use std::collections::{HashMap, VecDeque};
use std::process;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOverflowError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::columns::{Columns, TooLarge, Wanted};
use crate::librdkafka::{self, Client, KafkaError, Message, Position, Queue};

#[cfg(test)]
mod fuzz;

/// librdkafka's code of an event: the log has been read to its end.
const PARTITION_EOF: i32 = -191;
/// Messages that are taken from a queue at a time. So many may wait outside of the queue.
const BATCH: usize = 1_024;
/// The events that are taken at a time.
const EVENTS: usize = 64;
/// What is expected of a record's size before one was read, and what is reserved at most.
const FIRST_RECORD_BYTES: usize = 128;
const RESERVED_BYTES_MAX: usize = 16 << 20;

struct Partition {
    /// Taken from the queue, and not in a chunk yet.
    ahead: VecDeque<Message>,
    queue: Queue,
}

/// Fields are dropped in this order: messages and queues before their client.
struct State {
    partitions: HashMap<(String, i32), Partition>,
    scratch: Vec<Message>,
    events: Queue,
    columns: Option<Columns>,
    record_bytes: usize,
    client: Client,
}

enum Failure {
    Closed,
    Forked,
    TooLarge {
        topic: String,
        partition: i32,
        offset: i64,
    },
    Kafka(KafkaError),
    Misused(&'static str),
}

impl From<KafkaError> for Failure {
    fn from(error: KafkaError) -> Self {
        Failure::Kafka(error)
    }
}

impl Failure {
    fn into_python(self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Closed => PyRuntimeError::new_err("Consumer closed"),
            Failure::Forked => {
                PyRuntimeError::new_err("a consumer cannot be used in a child process")
            }
            Failure::Misused(what) => PyRuntimeError::new_err(what),
            Failure::TooLarge {
                topic,
                partition,
                offset,
            } => PyOverflowError::new_err(format!(
                "the record at offset {offset} of partition {topic}/{partition} is too large"
            )),
            Failure::Kafka(error) => exception(py, &error).unwrap_or_else(|failed| failed),
        }
    }
}

/// The `KafkaError` of confluent-kafka.
fn python_error<'py>(py: Python<'py>, error: &KafkaError) -> PyResult<Bound<'py, PyAny>> {
    let made = py.import("confluent_kafka")?.getattr("KafkaError")?;
    made.call1((
        error.code,
        error.text.as_str(),
        error.fatal,
        error.retriable,
    ))
}

fn exception(py: Python<'_>, error: &KafkaError) -> PyResult<PyErr> {
    let raised = py.import("confluent_kafka")?.getattr("KafkaException")?;
    Ok(PyErr::from_value(
        raised.call1((python_error(py, error)?,))?,
    ))
}

/// (topic, partition, offset or below 0, leader epoch or None)
type Placed = (String, i32, i64, Option<i32>);
/// (topic or None, partition, offset, code, text)
type Event = (Option<String>, i32, i64, i32, String);
/// (rows that were added, the next offset, how it ended, offset, code or epoch, text)
type Filled = (usize, i64, &'static str, i64, i32, String);

/// (events, errors, the configuration for a token if one is wanted, statistics in JSON if there are
/// new ones)
type Served<'py> = (
    Vec<Event>,
    Vec<Bound<'py, PyAny>>,
    Option<String>,
    Option<String>,
);

fn positions(placed: Vec<Placed>) -> Vec<Position> {
    let position = |(topic, partition, offset, leader_epoch)| Position {
        topic,
        partition,
        offset,
        leader_epoch,
    };
    placed.into_iter().map(position).collect()
}

#[pyclass(frozen)]
pub struct Consumer {
    state: Mutex<Option<State>>,
    process: u32,
}

impl Consumer {
    /// Run this without the interpreter. Fails if the consumer is closed, or was inherited by a fork:
    /// librdkafka's threads exist only in the parent.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut State) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        if self.process != process::id() {
            return Err(Failure::Forked.into_python(py));
        }
        py.detach(|| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            run(state.as_mut().ok_or(Failure::Closed)?)
        })
        .map_err(|failure| failure.into_python(py))
    }
}

#[pymethods]
impl Consumer {
    /// `settings`: names and values of librdkafka. `asks_for_tokens`: whether `serve` says when a
    /// token for OAuth is wanted. Raises `KafkaException`.
    #[new]
    fn new(
        py: Python<'_>,
        settings: Vec<(String, Option<String>)>,
        asks_for_tokens: bool,
    ) -> PyResult<Self> {
        let client = py
            .detach(|| Client::new(&settings, asks_for_tokens))
            .map_err(|error| Failure::Kafka(error).into_python(py))?;
        let state = State {
            partitions: HashMap::new(),
            scratch: Vec::new(),
            events: client.events_queue(),
            columns: None,
            record_bytes: FIRST_RECORD_BYTES,
            client,
        };
        Ok(Consumer {
            state: Mutex::new(Some(state)),
            process: process::id(),
        })
    }

    /// What does not belong to a partition: (events, errors that librdkafka has reported, the
    /// configuration for a token if one is wanted, new statistics in JSON). Never waits.
    fn serve<'py>(&self, py: Python<'py>) -> PyResult<Served<'py>> {
        let (events, reported) = self.with(py, |state| {
            let mut heard = Vec::new();
            state.events.take(0, EVENTS, &mut heard)?;
            if heard.iter().any(|message: &Message| !message.is_event()) {
                return Err(Failure::Misused("a record came by the queue of events"));
            }
            let events: Vec<Event> = heard.iter().map(event).collect();
            Ok((events, state.client.take_events()))
        })?;
        let errors = reported
            .errors
            .iter()
            .map(|error| python_error(py, error))
            .collect::<PyResult<Vec<_>>>()?;
        Ok((events, errors, reported.token_wanted, reported.statistics))
    }

    /// Topic -> the numbers of its partitions.
    #[pyo3(signature = (topic, timeout_ms))]
    fn partitions_of(
        &self,
        py: Python<'_>,
        topic: Option<String>,
        timeout_ms: i32,
    ) -> PyResult<Vec<(String, Vec<i32>)>> {
        self.with(py, |state| {
            Ok(state.client.partitions_of(topic.as_deref(), timeout_ms)?)
        })
    }

    /// Read these partitions too, each from its position.
    fn incremental_assign(&self, py: Python<'_>, placed: Vec<Placed>) -> PyResult<()> {
        self.with(py, |state| {
            let positions = positions(placed);
            let mut opened = Vec::new();
            for each in &positions {
                // Before it is assigned: no record may go elsewhere.
                let queue = state.client.partition_queue(&each.topic, each.partition)?;
                opened.push((
                    (each.topic.clone(), each.partition),
                    Partition {
                        ahead: VecDeque::new(),
                        queue,
                    },
                ));
            }
            state.client.incremental_assign(&positions)?;
            state.partitions.extend(opened);
            Ok(())
        })
    }

    /// Read these partitions no longer. Drops what was fetched of them.
    fn incremental_unassign(&self, py: Python<'_>, placed: Vec<Placed>) -> PyResult<()> {
        self.with(py, |state| {
            let positions = positions(placed);
            let done = state.client.incremental_unassign(&positions);
            for each in positions {
                let gone = state.partitions.remove(&(each.topic, each.partition));
                if let Some(Partition { queue, .. }) = gone {
                    // librdkafka keeps what it has fetched until it is taken.
                    while queue.take(0, BATCH, &mut state.scratch)? > 0 {
                        state.scratch.clear();
                    }
                }
            }
            Ok(done?)
        })
    }

    /// Continue at this position. Drops what was fetched before.
    fn seek(&self, py: Python<'_>, placed: Placed, timeout_ms: i32) -> PyResult<()> {
        self.with(py, |state| {
            for position in positions(vec![placed]) {
                if let Some(partition) = state
                    .partitions
                    .get_mut(&(position.topic.clone(), position.partition))
                {
                    partition.ahead.clear();
                }
                state.client.seek(position, timeout_ms)?;
            }
            Ok(())
        })
    }

    /// The partitions of which a record or an event has arrived. Never waits.
    fn arrived(&self, py: Python<'_>) -> PyResult<Vec<(String, i32)>> {
        self.with(py, |state| {
            let arrived = state
                .partitions
                .iter()
                .filter(|(_, each)| !each.ahead.is_empty() || !each.queue.is_empty());
            Ok(arrived.map(|(tp, _)| tp.clone()).collect())
        })
    }

    /// Begin a chunk with these columns, of about so many records.
    #[allow(clippy::too_many_arguments)] // a flag for each column
    fn begin(
        &self,
        py: Python<'_>,
        keys: bool,
        headers: bool,
        timestamps: bool,
        epochs: bool,
        rows: usize,
    ) -> PyResult<()> {
        self.with(py, |state| {
            let size = rows
                .saturating_mul(state.record_bytes)
                .min(RESERVED_BYTES_MAX);
            state.columns = Some(Columns::new(
                Wanted {
                    keys,
                    headers,
                    timestamps,
                    epochs,
                },
                rows,
                size,
            ));
            Ok(())
        })
    }

    /// Add records of a partition to the chunk: those from `position` to `end` (None: all that come),
    /// until the chunk has `rows_max` rows or `bytes_max` bytes. Waits up to `wait_ms` for what has
    /// not come yet.
    ///
    /// Returns how it ended: "complete" (a record at or after `end` was seen, or `end - 1` was
    /// added), "full", "waiting" (nothing more has come), "event" (with offset, code and text), or
    /// "replaced" (a record of a later leader epoch than `epoch_max`; with its offset and epoch). An
    /// event ends it after the records that came before it; that the log ended before `end` is none.
    /// Without an `end`, it is one.
    #[allow(clippy::too_many_arguments)] // names of a range's parts; they are passed by keyword
    #[pyo3(signature = (*, topic, partition, position, end, epoch_max, rows_max, bytes_max, wait_ms))]
    fn fill(
        &self,
        py: Python<'_>,
        topic: String,
        partition: i32,
        position: i64,
        end: Option<i64>,
        epoch_max: Option<i32>,
        rows_max: usize,
        bytes_max: usize,
        wait_ms: u64,
    ) -> PyResult<Filled> {
        self.with(py, |state| {
            let range = Range {
                next: position,
                end,
                epoch_max,
            };
            let limits = Limits {
                rows_max,
                bytes_max,
                deadline: Instant::now() + Duration::from_millis(wait_ms),
            };
            state.fill((topic, partition), range, limits)
        })
    }

    /// The columns of the chunk that was begun.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = self.with(py, |state| {
            let columns = state
                .columns
                .take()
                .ok_or(Failure::Misused("no chunk was begun"))?;
            if columns.rows() > 0 {
                state.record_bytes = columns.size().div_ceil(columns.rows()).max(1);
            }
            Ok(columns)
        })?;
        columns.finish(py)
    }

    /// Give librdkafka the token that it wanted.
    fn set_token(
        &self,
        py: Python<'_>,
        token: String,
        expires_at_ms: i64,
        principal: String,
        extensions: Vec<(String, String)>,
    ) -> PyResult<()> {
        self.with(py, |state| {
            Ok(state
                .client
                .set_token(&token, expires_at_ms, &principal, &extensions)?)
        })
    }

    /// Say that there is no token. librdkafka asks again later.
    fn token_failed(&self, py: Python<'_>, reason: String) -> PyResult<()> {
        self.with(py, |state| {
            state.client.token_failed(&reason);
            Ok(())
        })
    }

    /// Stop reading, and end librdkafka's threads. May be called again.
    fn close(&self, py: Python<'_>) {
        if self.process == process::id() {
            py.detach(|| {
                let taken = self
                    .state
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(mut state) = taken {
                    state.partitions.clear();
                    state.client.close();
                }
            });
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        if self.process != process::id() {
            // Inherited by a fork: its threads are not here, and waiting for them would never end.
            std::mem::forget(
                self.state
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            );
        }
    }
}

struct Range {
    next: i64,
    /// None: the range has no end.
    end: Option<i64>,
    epoch_max: Option<i32>,
}

impl Range {
    fn ends_at_or_before(&self, offset: i64) -> bool {
        self.end.is_some_and(|end| offset >= end)
    }
}

struct Limits {
    rows_max: usize,
    bytes_max: usize,
    deadline: Instant,
}

impl State {
    fn fill(
        &mut self,
        key: (String, i32),
        mut range: Range,
        limits: Limits,
    ) -> Result<Filled, Failure> {
        let partition = self
            .partitions
            .get_mut(&key)
            .ok_or(Failure::Misused("the partition is not assigned"))?;
        let columns = self
            .columns
            .as_mut()
            .ok_or(Failure::Misused("no chunk was begun"))?;
        let before = columns.rows();
        let (how, offset, number, text) = loop {
            if let Some(end) = add(&mut partition.ahead, columns, &mut range, &limits)
                .map_err(|large| large.of(&key))?
            {
                break end;
            }
            // Never more than the range can hold, so that only gaps make it take too much.
            let most = range.end.map_or(BATCH, |end| {
                usize::try_from(end - range.next).unwrap_or(0).min(BATCH)
            });
            if partition.queue.take(0, most, &mut self.scratch)? == 0 {
                let left = limits.deadline.saturating_duration_since(Instant::now());
                let left_ms = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
                if left_ms == 0 || partition.queue.take(left_ms, 1, &mut self.scratch)? == 0 {
                    break ("waiting", -1, 0, String::new());
                }
            }
            partition.ahead.extend(self.scratch.drain(..));
        };
        Ok((
            columns.rows() - before,
            range.next,
            how,
            offset,
            number,
            text,
        ))
    }
}

struct TooLargeAt(i64);

impl TooLargeAt {
    fn of(self, (topic, partition): &(String, i32)) -> Failure {
        Failure::TooLarge {
            topic: topic.clone(),
            partition: *partition,
            offset: self.0,
        }
    }
}

/// How a `fill` ended: a word, an offset, a code or an epoch, a text.
type End = (&'static str, i64, i32, String);

/// Move records into the columns. The first and the last of those that are ahead, and of the range,
/// are sampled. Returns None when there is none left, and more are wanted.
fn add(
    ahead: &mut VecDeque<Message>,
    columns: &mut Columns,
    range: &mut Range,
    limits: &Limits,
) -> Result<Option<End>, TooLargeAt> {
    let mut is_first = true;
    loop {
        if range.ends_at_or_before(range.next) {
            return Ok(Some(("complete", -1, 0, String::new())));
        }
        let Some(message) = ahead.front() else {
            return Ok(None);
        };
        let offset = message.offset();
        if message.is_event() {
            let (_, _, offset, code, text) = event(message);
            ahead.pop_front();
            if code == PARTITION_EOF && range.end.is_some_and(|end| offset < end) {
                continue; // the log has grown since, or will; a consumer that waited has seen many
            }
            return Ok(Some(("event", offset, code, text)));
        }
        if offset >= range.next {
            if range.ends_at_or_before(offset) {
                return Ok(Some(("complete", -1, 0, String::new())));
            }
            let epoch = message.leader_epoch();
            if range.epoch_max.is_some_and(|most| epoch > most) {
                return Ok(Some(("replaced", offset, epoch, String::new())));
            }
            let has_room = columns
                .has_room(message, limits.bytes_max)
                .map_err(|TooLarge| TooLargeAt(offset))?;
            if columns.rows() >= limits.rows_max || !has_room {
                return Ok(Some(("full", -1, 0, String::new())));
            }
            columns.push(message);
            range.next = offset + 1;
            if is_first || ahead.len() == 1 || range.ends_at_or_before(range.next) {
                columns.sample(message);
                is_first = false;
            }
        }
        ahead.pop_front();
    }
}

fn event(message: &Message) -> Event {
    let error = message.error();
    (
        message.topic(),
        message.partition(),
        message.offset(),
        error.code,
        error.text,
    )
}

/// Load librdkafka from the file that confluent-kafka has loaded. Returns its version. Raises
/// `RuntimeError` with the reason if it cannot be used.
#[pyfunction]
fn load_librdkafka(path: &str) -> PyResult<i32> {
    librdkafka::load(path).map_err(PyRuntimeError::new_err)
}

/// The version of what this file shows to Python. `spouts/kafka/consumer/native_range_consumer.py` expects it.
const INTERFACE: i32 = 2;

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("INTERFACE", INTERFACE)?;
    module.add_class::<Consumer>()?;
    module.add_function(wrap_pyfunction!(load_librdkafka, module)?)
}
