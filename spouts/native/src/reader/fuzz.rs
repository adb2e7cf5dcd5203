//! Random records go through a cluster that librdkafka itself simulates, and come back as columns.
//!
//! What is read is compared with what was sent. Run under valgrind, the test also says whether all
//! that was borrowed from librdkafka was used within its life, and given back once
//! (`tests/spouts/test_native_crate.py`). The file of the library is named by
//! `RATCHET_LIBRDKAFKA`; without it, nothing is tested here, and the output says so.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, Symbol, RTLD_LOCAL, RTLD_NOW};

use super::*;
use crate::columns::Row;

const TOPIC: &str = "fuzzed";
const PARTITIONS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(120);

/// Of `rd_kafka_vtype_t`, and of the flags of a message.
const VTYPE_END: c_int = 0;
const VTYPE_TOPIC: c_int = 1;
const VTYPE_PARTITION: c_int = 3;
const VTYPE_VALUE: c_int = 4;
const VTYPE_KEY: c_int = 5;
const VTYPE_MSGFLAGS: c_int = 7;
const VTYPE_TIMESTAMP: c_int = 8;
const VTYPE_HEADERS: c_int = 10;
const COPY: c_int = 2;

/// Numbers that look random, the same ones for the same seed (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        // Few are large: the simulated log keeps its last 5 MB.
        let len = match self.below(400) {
            0..50 => return None,
            50..100 => 0,
            399 => 100_000 + self.below(200_000),
            _ => 1 + self.below(300),
        };
        let first = self.below(256);
        Some((0..len).map(|index| (first + 31 * index) as u8).collect())
    }

    fn headers(&mut self) -> Vec<(CString, Option<Vec<u8>>)> {
        let count = self.below(6).saturating_sub(2);
        (0..count)
            .map(|_| {
                let len = self.below(5);
                // Never zero; also bytes that are not UTF-8.
                let name: Vec<u8> = (0..len).map(|_| 1 + self.below(255) as u8).collect();
                (CString::new(name).unwrap(), self.bytes())
            })
            .collect()
    }
}

/// A producer, and the cluster that lives in it.
struct Cluster {
    library: Library,
    raw: *mut c_void,
}

impl Cluster {
    /// # Safety
    /// `T` is the type of the function of that name in rdkafka.h or rdkafka_mock.h.
    unsafe fn function<T>(&self, name: &str) -> Symbol<T> {
        self.library.get(name.as_bytes()).unwrap()
    }

    fn new(path: &str) -> Self {
        // SAFETY: the calls are those of the documentation; the cluster ends with its client.
        unsafe {
            let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).unwrap();
            let mut cluster = Cluster {
                library,
                raw: ptr::null_mut(),
            };
            let conf =
                cluster.function::<unsafe extern "C" fn() -> *mut c_void>("rd_kafka_conf_new")();
            let set: Symbol<
                unsafe extern "C" fn(
                    *mut c_void,
                    *const c_char,
                    *const c_char,
                    *mut c_char,
                    usize,
                ) -> c_int,
            > = cluster.function("rd_kafka_conf_set");
            let mut text = [0 as c_char; 512];
            for (name, value) in [
                (c"test.mock.num.brokers", c"1"),
                (c"linger.ms", c"0"),
                (c"message.max.bytes", c"10000000"),
                (c"log_level", c"2"),
            ] {
                let code = set(conf, name.as_ptr(), value.as_ptr(), text.as_mut_ptr(), 512);
                assert_eq!(code, 0);
            }
            let new: Symbol<
                unsafe extern "C" fn(c_int, *mut c_void, *mut c_char, usize) -> *mut c_void,
            > = cluster.function("rd_kafka_new");
            let raw = new(0, conf, text.as_mut_ptr(), 512);
            assert!(!raw.is_null());
            cluster.raw = raw;
            let create: Symbol<
                unsafe extern "C" fn(*mut c_void, *const c_char, c_int, c_int) -> c_int,
            > = cluster.function("rd_kafka_mock_topic_create");
            let topic = CString::new(TOPIC).unwrap();
            let code = create(cluster.mock(), topic.as_ptr(), PARTITIONS as c_int, 1);
            assert_eq!(code, 0);
            cluster
        }
    }

    fn mock(&self) -> *mut c_void {
        // SAFETY: the client has a cluster.
        unsafe {
            self.function::<unsafe extern "C" fn(*mut c_void) -> *mut c_void>(
                "rd_kafka_handle_mock_cluster",
            )(self.raw)
        }
    }

    fn bootstraps(&self) -> String {
        // SAFETY: the text belongs to the cluster.
        unsafe {
            let bootstraps: Symbol<unsafe extern "C" fn(*mut c_void) -> *const c_char> =
                self.function("rd_kafka_mock_cluster_bootstraps");
            CStr::from_ptr(bootstraps(self.mock()))
                .to_str()
                .unwrap()
                .to_string()
        }
    }

    fn send(&self, partition: usize, row: &Row, headers: &[(CString, Option<Vec<u8>>)]) {
        fn shown(bytes: &Option<Vec<u8>>) -> (*const c_void, usize) {
            bytes.as_ref().map_or((ptr::null(), 0), |each| {
                (each.as_ptr() as *const c_void, each.len())
            })
        }
        let topic = CString::new(TOPIC).unwrap();
        let ((value, value_len), (key, key_len)) = (shown(&row.value), shown(&row.key));
        // SAFETY: every type is followed by what rdkafka.h says, the headers belong to the message
        // when it was taken, and the bytes are copied.
        unsafe {
            let list = self
                .function::<unsafe extern "C" fn(usize) -> *mut c_void>("rd_kafka_headers_new")(
                headers.len(),
            );
            let add: Symbol<
                unsafe extern "C" fn(
                    *mut c_void,
                    *const c_char,
                    isize,
                    *const c_void,
                    isize,
                ) -> c_int,
            > = self.function("rd_kafka_header_add");
            for (name, value) in headers {
                let (bytes, len) = shown(value);
                assert_eq!(add(list, name.as_ptr(), -1, bytes, len as isize), 0);
            }
            let send: Symbol<unsafe extern "C" fn(*mut c_void, ...) -> c_int> =
                self.function("rd_kafka_producev");
            let code = send(
                self.raw,
                VTYPE_TOPIC,
                topic.as_ptr(),
                VTYPE_PARTITION,
                partition as c_int,
                VTYPE_MSGFLAGS,
                COPY,
                VTYPE_VALUE,
                value,
                value_len,
                VTYPE_KEY,
                key,
                key_len,
                VTYPE_TIMESTAMP,
                row.timestamp_ms.unwrap(),
                VTYPE_HEADERS,
                list,
                VTYPE_END,
            );
            assert_eq!(code, 0);
        }
    }

    fn flush(&self) {
        // SAFETY: as documented.
        unsafe {
            let flush: Symbol<unsafe extern "C" fn(*mut c_void, c_int) -> c_int> =
                self.function("rd_kafka_flush");
            assert_eq!(flush(self.raw, PATIENCE.as_millis() as c_int), 0);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nobody uses the client any more.
        unsafe {
            self.function::<unsafe extern "C" fn(*mut c_void)>("rd_kafka_destroy")(self.raw);
        }
    }
}

fn reader(bootstraps: &str) -> State {
    let settings = [
        ("bootstrap.servers", bootstraps),
        ("group.id", "fuzz"),
        ("enable.auto.commit", "false"),
        ("enable.partition.eof", "true"),
        ("auto.offset.reset", "error"),
        ("fetch.wait.max.ms", "10"),
        ("log_level", "2"),
    ];
    let settings: Vec<_> = settings
        .iter()
        .map(|(name, value)| (name.to_string(), Some(value.to_string())))
        .collect();
    let client = Client::new(&settings, false).ok().unwrap();
    State {
        partitions: HashMap::new(),
        scratch: Vec::new(),
        events: client.events_queue(),
        columns: None,
        record_bytes: FIRST_RECORD_BYTES,
        client,
    }
}

fn place(state: &mut State, partition: usize, offset: i64) {
    let position = || Position {
        topic: TOPIC.to_string(),
        partition: partition as i32,
        offset,
        leader_epoch: None,
    };
    let key = (TOPIC.to_string(), partition as i32);
    if state.partitions.contains_key(&key) {
        assert!(state.client.incremental_unassign(&[position()]).is_ok());
        state.partitions.remove(&key); // with messages that were taken, and are in no chunk yet
    }
    let queue = state
        .client
        .partition_queue(TOPIC, partition as i32)
        .ok()
        .unwrap();
    let ahead = VecDeque::new();
    state.partitions.insert(key, Partition { ahead, queue });
    assert!(state.client.incremental_assign(&[position()]).is_ok());
}

/// Reads random ranges into chunks of random sizes, and compares each chunk with what was sent.
fn read(state: &mut State, sent: &[Vec<Row>], dice: &mut Dice, ranges: usize) {
    let deadline = Instant::now() + PATIENCE;
    let mut next = vec![-1i64; sent.len()]; // where the consumer stands; it is not assigned yet
    for _ in 0..ranges {
        let partition = dice.below(sent.len());
        let total = sent[partition].len();
        let begin = match next[partition] {
            at if at >= 0 && (at as usize) < total && dice.below(4) > 0 => at,
            _ => {
                let at = dice.below(total) as i64;
                place(state, partition, at);
                at
            }
        };
        let end = begin + 1 + dice.below(total - begin as usize) as i64;
        let wanted = Wanted {
            keys: dice.below(2) == 0,
            headers: dice.below(2) == 0,
            timestamps: dice.below(2) == 0,
            epochs: dice.below(2) == 0,
        };
        let mut position = begin;
        while position < end {
            state.columns = Some(Columns::new(wanted, dice.below(50), dice.below(1_000)));
            let (first, rows_max) = (position, 1 + dice.below(200));
            let bytes_max = 1 + dice.below(200_000);
            let mut how = "waiting";
            while how == "waiting" {
                assert!(Instant::now() < deadline, "nothing came");
                let range = Range {
                    next: position,
                    end: Some(end),
                    epoch_max: None,
                };
                let limits = Limits {
                    rows_max,
                    bytes_max,
                    deadline: Instant::now() + Duration::from_millis(20),
                };
                let Ok(filled) = state.fill((TOPIC.to_string(), partition as i32), range, limits)
                else {
                    panic!("the fill failed");
                };
                assert!(filled.2 != "event", "{}: {}", filled.4, filled.5);
                (position, how) = (filled.1, filled.2);
            }
            let columns = state.columns.take().unwrap();
            assert_eq!(columns.rows() as i64, position - first);
            for (index, row) in sent[partition][first as usize..position as usize]
                .iter()
                .enumerate()
            {
                assert_eq!(columns.row(index), row.part(wanted));
            }
            assert!(
                columns.rows() <= rows_max && (columns.rows() == 1 || columns.size() <= bytes_max)
            );
        }
        next[partition] = end;
    }
}

#[test]
fn random_records_come_back_as_they_were_sent() {
    let Ok(path) = std::env::var("RATCHET_LIBRDKAFKA") else {
        println!("skipped: RATCHET_LIBRDKAFKA does not name the file of librdkafka");
        return;
    };
    let number = |name: &str, otherwise: usize| {
        std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
    };
    let records = number("RATCHET_FUZZ_RECORDS", 900);
    let seed = number("RATCHET_FUZZ_SEED", 22) as u64;
    librdkafka::load(&path).unwrap();
    println!("seed {seed}, {records} records");
    let mut dice = Dice(seed);
    let cluster = Cluster::new(&path);
    let mut sent: Vec<Vec<Row>> = (0..PARTITIONS).map(|_| Vec::new()).collect();
    for number in 0..records {
        let partition = number % PARTITIONS;
        let headers = dice.headers();
        let row = Row {
            offset: sent[partition].len() as i64,
            value: dice.bytes(),
            key: dice.bytes(),
            timestamp_ms: Some(1 + dice.below(1 << 40) as i64),
            headers: headers
                .iter()
                .map(|(name, value)| (name.to_str().unwrap_or("\u{FFFD}").to_owned(), value.clone()))
                .collect(),
        };
        cluster.send(partition, &row, &headers);
        sent[partition].push(row);
    }
    cluster.flush();
    for _ in 0..2 {
        // The second consumer is dropped while messages of the last range are still ahead.
        let mut state = reader(&cluster.bootstraps());
        read(&mut state, &sent, &mut dice, 30);
        state.partitions.clear();
        state.client.close();
    }
}
