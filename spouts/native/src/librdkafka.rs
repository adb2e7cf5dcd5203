//! The C API of librdkafka: as much of it as reading needs, loaded from the library that
//! confluent-kafka brings.
//!
//! All `unsafe` code that touches librdkafka is in this file. Each wrapper owns what the library
//! says that the caller owns, and gives it back once, when it is dropped:
//!
//! 1. `Message` came from `rd_kafka_consume_batch_queue` and was not destroyed yet.
//! 2. `Queue`, `PartitionList`, `Topic` and `Metadata` were returned by the call that makes them.
//! 3. `Client` is dropped after every message and queue of it; `reader.rs` holds them in that order.
//! 4. The library is never unloaded, so that its functions and threads outlive everything here.
//! 5. Callbacks run no Python code and never unwind: they only write into `Events`.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

#[repr(C)]
pub struct RawClient([u8; 0]);
#[repr(C)]
pub struct RawConf([u8; 0]);
#[repr(C)]
pub struct RawQueue([u8; 0]);
#[repr(C)]
pub struct RawTopic([u8; 0]);
#[repr(C)]
pub struct RawError([u8; 0]);
#[repr(C)]
pub struct RawHeaders([u8; 0]);

/// `rd_kafka_message_t`, a public and stable layout.
#[repr(C)]
pub struct RawMessage {
    err: c_int,
    topic: *mut RawTopic,
    partition: i32,
    payload: *mut c_void,
    len: usize,
    key: *mut c_void,
    key_len: usize,
    offset: i64,
    private: *mut c_void,
}

/// `rd_kafka_topic_partition_t`.
#[repr(C)]
pub struct RawPartition {
    topic: *mut c_char,
    partition: i32,
    offset: i64,
    metadata: *mut c_void,
    metadata_size: usize,
    opaque: *mut c_void,
    err: c_int,
    private: *mut c_void,
}

/// `rd_kafka_topic_partition_list_t`.
#[repr(C)]
pub struct RawPartitionList {
    count: c_int,
    size: c_int,
    elements: *mut RawPartition,
}

#[repr(C)]
struct RawMetadataPartition {
    id: i32,
    err: c_int,
    leader: i32,
    replica_count: c_int,
    replicas: *mut i32,
    isr_count: c_int,
    isrs: *mut i32,
}

#[repr(C)]
struct RawMetadataTopic {
    topic: *mut c_char,
    partition_count: c_int,
    partitions: *mut RawMetadataPartition,
    err: c_int,
}

#[repr(C)]
pub struct RawMetadata {
    broker_count: c_int,
    brokers: *mut c_void,
    topic_count: c_int,
    topics: *mut RawMetadataTopic,
    original_broker_id: i32,
    original_broker_name: *mut c_char,
}

type ErrorCallback = unsafe extern "C" fn(*mut RawClient, c_int, *const c_char, *mut c_void);
type StatisticsCallback =
    unsafe extern "C" fn(*mut RawClient, *mut c_char, usize, *mut c_void) -> c_int;
type OauthCallback = unsafe extern "C" fn(*mut RawClient, *const c_char, *mut c_void);

macro_rules! api {
    ($(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Api { $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Api {
            fn of(library: &Library) -> Result<Api, libloading::Error> {
                // SAFETY: the signatures are those of rdkafka.h; they have not changed since 2.1.
                Ok(unsafe { Api { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* } })
            }
        }
    };
}

api! {
    fn rd_kafka_version() -> c_int;
    fn rd_kafka_err2str(c_int) -> *const c_char;
    fn rd_kafka_last_error() -> c_int;
    fn rd_kafka_error_code(*const RawError) -> c_int;
    fn rd_kafka_error_string(*const RawError) -> *const c_char;
    fn rd_kafka_error_is_fatal(*const RawError) -> c_int;
    fn rd_kafka_error_is_retriable(*const RawError) -> c_int;
    fn rd_kafka_error_destroy(*mut RawError);
    fn rd_kafka_fatal_error(*mut RawClient, *mut c_char, usize) -> c_int;
    fn rd_kafka_conf_new() -> *mut RawConf;
    fn rd_kafka_conf_destroy(*mut RawConf);
    fn rd_kafka_conf_set(*mut RawConf, *const c_char, *const c_char, *mut c_char, usize) -> c_int;
    fn rd_kafka_conf_set_opaque(*mut RawConf, *mut c_void);
    fn rd_kafka_conf_set_error_cb(*mut RawConf, ErrorCallback);
    fn rd_kafka_conf_set_stats_cb(*mut RawConf, StatisticsCallback);
    fn rd_kafka_conf_set_oauthbearer_token_refresh_cb(*mut RawConf, OauthCallback);
    fn rd_kafka_oauthbearer_set_token(*mut RawClient, *const c_char, i64, *const c_char, *const *const c_char, usize, *mut c_char, usize) -> c_int;
    fn rd_kafka_oauthbearer_set_token_failure(*mut RawClient, *const c_char) -> c_int;
    fn rd_kafka_new(c_int, *mut RawConf, *mut c_char, usize) -> *mut RawClient;
    fn rd_kafka_destroy_flags(*mut RawClient, c_int);
    fn rd_kafka_consumer_close(*mut RawClient) -> c_int;
    fn rd_kafka_poll_set_consumer(*mut RawClient) -> c_int;
    fn rd_kafka_topic_new(*mut RawClient, *const c_char, *mut c_void) -> *mut RawTopic;
    fn rd_kafka_topic_destroy(*mut RawTopic);
    fn rd_kafka_topic_name(*const RawTopic) -> *const c_char;
    fn rd_kafka_metadata(*mut RawClient, c_int, *mut RawTopic, *mut *const RawMetadata, c_int) -> c_int;
    fn rd_kafka_metadata_destroy(*const RawMetadata);
    fn rd_kafka_topic_partition_list_new(c_int) -> *mut RawPartitionList;
    fn rd_kafka_topic_partition_list_add(*mut RawPartitionList, *const c_char, i32) -> *mut RawPartition;
    fn rd_kafka_topic_partition_list_destroy(*mut RawPartitionList);
    fn rd_kafka_topic_partition_set_leader_epoch(*mut RawPartition, i32);
    fn rd_kafka_incremental_assign(*mut RawClient, *const RawPartitionList) -> *mut RawError;
    fn rd_kafka_incremental_unassign(*mut RawClient, *const RawPartitionList) -> *mut RawError;
    fn rd_kafka_seek_partitions(*mut RawClient, *mut RawPartitionList, c_int) -> *mut RawError;
    fn rd_kafka_queue_get_consumer(*mut RawClient) -> *mut RawQueue;
    fn rd_kafka_queue_get_partition(*mut RawClient, *const c_char, i32) -> *mut RawQueue;
    fn rd_kafka_queue_forward(*mut RawQueue, *mut RawQueue);
    fn rd_kafka_queue_destroy(*mut RawQueue);
    fn rd_kafka_queue_length(*mut RawQueue) -> usize;
    fn rd_kafka_consume_batch_queue(*mut RawQueue, c_int, *mut *mut RawMessage, usize) -> isize;
    fn rd_kafka_message_destroy(*mut RawMessage);
    fn rd_kafka_message_errstr(*const RawMessage) -> *const c_char;
    fn rd_kafka_message_timestamp(*const RawMessage, *mut c_int) -> i64;
    fn rd_kafka_message_leader_epoch(*const RawMessage) -> i32;
    fn rd_kafka_message_headers(*const RawMessage, *mut *mut RawHeaders) -> c_int;
    fn rd_kafka_header_get_all(*const RawHeaders, usize, *mut *const c_char, *mut *const c_void, *mut usize) -> c_int;
}

static API: OnceLock<Api> = OnceLock::new();

const CONSUMER: c_int = 1;
const NO_CONSUMER_CLOSE: c_int = 0x8;
const TIMESTAMP_NOT_AVAILABLE: c_int = 0;
const ERROR_TEXT_BYTES: usize = 512;
/// librdkafka's codes for a wrong setting, and for an error after which a client is useless.
const INVALID_ARG: i32 = -186;
const FATAL: i32 = -150;
/// The first version with leader epochs in its public API, 2.1.0.
const VERSION_MIN: c_int = 0x0201_0000;

/// Load the functions of the library at `path`, which confluent-kafka has loaded already. Returns
/// its version, or says what is wrong.
pub fn load(path: &str) -> Result<i32, String> {
    if API.get().is_none() {
        // SAFETY: the library is loaded in this process already, so its initialisers have run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| error.to_string())?;
        let found = Api::of(&library).map_err(|error| error.to_string())?;
        std::mem::forget(library); // invariant 4

        // SAFETY: no arguments, no state.
        let version = unsafe { (found.rd_kafka_version)() };
        if version < VERSION_MIN {
            return Err(format!("librdkafka {version:#010x} is too old"));
        }
        let _ = API.set(found); // another thread may have been first, with the same functions
    }
    // SAFETY: as above.
    Ok(unsafe { (api().rd_kafka_version)() })
}

pub fn is_loaded() -> bool {
    API.get().is_some()
}

fn api() -> &'static Api {
    API.get().expect("load comes first: Client::new checks it")
}

/// An error of librdkafka, as confluent-kafka's `KafkaError` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct KafkaError {
    pub code: i32,
    pub text: String,
    pub fatal: bool,
    pub retriable: bool,
}

impl KafkaError {
    pub fn new(code: i32, text: impl Into<String>) -> Self {
        KafkaError {
            code,
            text: text.into(),
            fatal: false,
            retriable: false,
        }
    }

    fn of_code(code: i32) -> Self {
        // SAFETY: takes a number, returns a string that lives for ever.
        Self::new(code, unsafe { text_of((api().rd_kafka_err2str)(code)) })
    }
}

/// # Safety
/// `text` is null, or a C string that lives until this returns.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    CStr::from_ptr(text).to_string_lossy().into_owned()
}

fn c_string(text: &str) -> Result<CString, KafkaError> {
    CString::new(text)
        .map_err(|_| KafkaError::new(INVALID_ARG, format!("{text:?} contains a zero byte")))
}

/// Fails with the error that `raw` describes, and frees it.
///
/// # Safety
/// `raw` is null, or an error that the caller owns.
unsafe fn checked(raw: *mut RawError) -> Result<(), KafkaError> {
    if raw.is_null() {
        return Ok(());
    }
    let error = KafkaError {
        code: (api().rd_kafka_error_code)(raw),
        text: text_of((api().rd_kafka_error_string)(raw)),
        fatal: (api().rd_kafka_error_is_fatal)(raw) != 0,
        retriable: (api().rd_kafka_error_is_retriable)(raw) != 0,
    };
    (api().rd_kafka_error_destroy)(raw);
    Err(error)
}

/// What librdkafka has reported through callbacks and nobody has taken yet.
#[derive(Default)]
pub struct Events {
    pub errors: Vec<KafkaError>,
    /// librdkafka wants a token, and this is `sasl.oauthbearer.config`.
    pub token_wanted: Option<String>,
    /// The latest statistics, in JSON.
    pub statistics: Option<String>,
}

type SharedEvents = Mutex<Events>;

/// At most so many errors are kept: nobody reads the older ones.
const ERRORS_MAX: usize = 100;

/// # Safety
/// `opaque` is the pointer that `Client::new` has set. It lives until after `rd_kafka_destroy`.
unsafe extern "C" fn on_error(
    client: *mut RawClient,
    code: c_int,
    reason: *const c_char,
    opaque: *mut c_void,
) {
    let mut error = KafkaError::new(code, text_of(reason));
    if code == FATAL {
        let mut text = [0 as c_char; ERROR_TEXT_BYTES];
        let code = (api().rd_kafka_fatal_error)(client, text.as_mut_ptr(), text.len());
        error = KafkaError {
            fatal: true,
            ..KafkaError::new(code, text_of(text.as_ptr()))
        };
    }
    let mut events = locked(&*(opaque as *const SharedEvents));
    if events.errors.len() < ERRORS_MAX {
        events.errors.push(error);
    }
}

/// # Safety
/// As `on_error`.
unsafe extern "C" fn on_token_wanted(
    _: *mut RawClient,
    config: *const c_char,
    opaque: *mut c_void,
) {
    locked(&*(opaque as *const SharedEvents)).token_wanted = Some(text_of(config));
}

/// # Safety
/// As `on_error`; `text` has `length` bytes. Returns 0: the library frees the text.
unsafe extern "C" fn on_statistics(
    _: *mut RawClient,
    text: *mut c_char,
    length: usize,
    opaque: *mut c_void,
) -> c_int {
    if !text.is_null() {
        let bytes = std::slice::from_raw_parts(text as *const u8, length);
        locked(&*(opaque as *const SharedEvents)).statistics =
            Some(String::from_utf8_lossy(bytes).into_owned());
    }
    0
}

fn locked(events: &SharedEvents) -> std::sync::MutexGuard<'_, Events> {
    events.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a partition is to be read from.
pub struct Position {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub leader_epoch: Option<i32>,
}

struct PartitionList(NonNull<RawPartitionList>);

impl PartitionList {
    fn of(positions: &[Position]) -> Result<Self, KafkaError> {
        let names = positions
            .iter()
            .map(|each| c_string(&each.topic))
            .collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the library copies the names, and the elements live as long as the list does. The
        // element is used before the next one is added, which may move it.
        unsafe {
            let made = NonNull::new((api().rd_kafka_topic_partition_list_new)(
                positions.len() as c_int
            ));
            let list =
                PartitionList(made.expect("librdkafka ends the process when it has no memory"));
            for (name, each) in names.iter().zip(positions) {
                let element = (api().rd_kafka_topic_partition_list_add)(
                    list.0.as_ptr(),
                    name.as_ptr(),
                    each.partition,
                );
                (*element).offset = each.offset;
                if let Some(epoch) = each.leader_epoch {
                    (api().rd_kafka_topic_partition_set_leader_epoch)(element, epoch);
                }
            }
            Ok(list)
        }
    }

    /// The first error of an element.
    fn errors(&self) -> Result<(), KafkaError> {
        // SAFETY: `count` elements are there.
        let elements = unsafe {
            let list = self.0.as_ref();
            std::slice::from_raw_parts(list.elements, list.count as usize)
        };
        match elements.iter().find(|each| each.err != 0) {
            Some(each) => Err(KafkaError::of_code(each.err)),
            None => Ok(()),
        }
    }
}

impl Drop for PartitionList {
    fn drop(&mut self) {
        // SAFETY: invariant 2.
        unsafe { (api().rd_kafka_topic_partition_list_destroy)(self.0.as_ptr()) }
    }
}

/// A consumer. Its methods may be called from any thread, as those of the library.
pub struct Client {
    raw: NonNull<RawClient>,
    events: Arc<SharedEvents>,
}

// SAFETY: librdkafka's clients are thread-safe.
unsafe impl Send for Client {}
unsafe impl Sync for Client {}

impl Client {
    /// `settings`: name and value; without a value, librdkafka's own. `asks_for_tokens`: whether
    /// `Events` say when a token is wanted; otherwise librdkafka makes or fetches tokens itself.
    pub fn new(
        settings: &[(String, Option<String>)],
        asks_for_tokens: bool,
    ) -> Result<Self, KafkaError> {
        if !is_loaded() {
            return Err(KafkaError::new(INVALID_ARG, "librdkafka is not loaded"));
        }
        let events = Arc::new(SharedEvents::default());
        // SAFETY: the configuration is ours until `rd_kafka_new` succeeds, and is destroyed otherwise.
        // The opaque pointer belongs to `events`, which `self` keeps until the client is destroyed.
        unsafe {
            let conf = (api().rd_kafka_conf_new)();
            let mut text = [0 as c_char; ERROR_TEXT_BYTES];
            for (name, value) in settings {
                if let Err(error) = set(conf, name, value.as_deref()) {
                    (api().rd_kafka_conf_destroy)(conf);
                    return Err(error);
                }
            }
            (api().rd_kafka_conf_set_opaque)(conf, Arc::as_ptr(&events) as *mut c_void);
            (api().rd_kafka_conf_set_error_cb)(conf, on_error);
            (api().rd_kafka_conf_set_stats_cb)(conf, on_statistics);
            if asks_for_tokens {
                (api().rd_kafka_conf_set_oauthbearer_token_refresh_cb)(conf, on_token_wanted);
            }
            let Some(raw) = NonNull::new((api().rd_kafka_new)(
                CONSUMER,
                conf,
                text.as_mut_ptr(),
                text.len(),
            )) else {
                let code = (api().rd_kafka_last_error)();
                (api().rd_kafka_conf_destroy)(conf);
                return Err(KafkaError::new(
                    code,
                    format!("Failed to create consumer: {}", text_of(text.as_ptr())),
                ));
            };
            (api().rd_kafka_poll_set_consumer)(raw.as_ptr());
            Ok(Client { raw, events })
        }
    }

    /// What was reported since the last call. `events_queue` must have been served before.
    pub fn take_events(&self) -> Events {
        std::mem::take(&mut *locked(&self.events))
    }

    /// The queue of errors that belong to no partition. Serving it runs the callbacks.
    pub fn events_queue(&self) -> Queue {
        // SAFETY: a consumer has this queue, and the caller owns the reference.
        Queue(
            unsafe { NonNull::new((api().rd_kafka_queue_get_consumer)(self.raw.as_ptr())) }
                .expect("a consumer"),
        )
    }

    /// The queue of one partition. From now on its records come here alone.
    pub fn partition_queue(&self, topic: &str, partition: i32) -> Result<Queue, KafkaError> {
        let name = c_string(topic)?;
        // SAFETY: the caller owns the reference; the name is copied.
        unsafe {
            let raw =
                (api().rd_kafka_queue_get_partition)(self.raw.as_ptr(), name.as_ptr(), partition);
            let raw = NonNull::new(raw)
                .ok_or_else(|| KafkaError::of_code((api().rd_kafka_last_error)()))?;
            (api().rd_kafka_queue_forward)(raw.as_ptr(), ptr::null_mut());
            Ok(Queue(raw))
        }
    }

    pub fn incremental_assign(&self, positions: &[Position]) -> Result<(), KafkaError> {
        let list = PartitionList::of(positions)?;
        // SAFETY: the library copies the list; the error is ours.
        unsafe {
            checked((api().rd_kafka_incremental_assign)(
                self.raw.as_ptr(),
                list.0.as_ptr(),
            ))
        }
    }

    pub fn incremental_unassign(&self, positions: &[Position]) -> Result<(), KafkaError> {
        let list = PartitionList::of(positions)?;
        // SAFETY: as above.
        unsafe {
            checked((api().rd_kafka_incremental_unassign)(
                self.raw.as_ptr(),
                list.0.as_ptr(),
            ))
        }
    }

    pub fn seek(&self, position: Position, timeout_ms: i32) -> Result<(), KafkaError> {
        let list = PartitionList::of(&[position])?;
        // SAFETY: the list is filled in place before the call returns; the error is ours.
        unsafe {
            checked((api().rd_kafka_seek_partitions)(
                self.raw.as_ptr(),
                list.0.as_ptr(),
                timeout_ms,
            ))?
        };
        list.errors()
    }

    /// Topic -> the numbers of its partitions; of one topic, or of all.
    pub fn partitions_of(
        &self,
        topic: Option<&str>,
        timeout_ms: i32,
    ) -> Result<Vec<(String, Vec<i32>)>, KafkaError> {
        let name = topic.map(c_string).transpose()?;
        // SAFETY: the topic and the metadata are ours and are given back below, in every case; between
        // the call that fills the metadata and the one that frees it, its arrays have the stated lengths.
        unsafe {
            let asked = match &name {
                None => ptr::null_mut(),
                Some(name) => {
                    let raw = (api().rd_kafka_topic_new)(
                        self.raw.as_ptr(),
                        name.as_ptr(),
                        ptr::null_mut(),
                    );
                    if raw.is_null() {
                        return Err(KafkaError::of_code((api().rd_kafka_last_error)()));
                    }
                    raw
                }
            };
            let mut raw: *const RawMetadata = ptr::null();
            let all = c_int::from(asked.is_null());
            let code =
                (api().rd_kafka_metadata)(self.raw.as_ptr(), all, asked, &mut raw, timeout_ms);
            if !asked.is_null() {
                (api().rd_kafka_topic_destroy)(asked);
            }
            if code != 0 {
                return Err(KafkaError::new(
                    code,
                    format!("Failed to get metadata: {}", KafkaError::of_code(code).text),
                ));
            }
            let mut found = Vec::new();
            for topic in slice((*raw).topics, (*raw).topic_count) {
                let partitions = slice(topic.partitions, topic.partition_count);
                found.push((
                    text_of(topic.topic),
                    partitions.iter().map(|each| each.id).collect(),
                ));
            }
            (api().rd_kafka_metadata_destroy)(raw);
            Ok(found)
        }
    }

    pub fn set_token(
        &self,
        token: &str,
        expires_at_ms: i64,
        principal: &str,
        extensions: &[(String, String)],
    ) -> Result<(), KafkaError> {
        let (token, principal) = (c_string(token)?, c_string(principal)?);
        let mut names = Vec::new();
        for (name, value) in extensions {
            names.push(c_string(name)?);
            names.push(c_string(value)?);
        }
        let pointers: Vec<*const c_char> = names.iter().map(|each| each.as_ptr()).collect();
        let mut text = [0 as c_char; ERROR_TEXT_BYTES];
        // SAFETY: the library copies all strings.
        let code = unsafe {
            (api().rd_kafka_oauthbearer_set_token)(
                self.raw.as_ptr(),
                token.as_ptr(),
                expires_at_ms,
                principal.as_ptr(),
                pointers.as_ptr(),
                pointers.len(),
                text.as_mut_ptr(),
                text.len(),
            )
        };
        match code {
            0 => Ok(()),
            // SAFETY: the library has written a C string.
            _ => Err(KafkaError::new(code, unsafe { text_of(text.as_ptr()) })),
        }
    }

    /// Say that there is no token; librdkafka asks again later.
    pub fn token_failed(&self, reason: &str) {
        if let Ok(reason) = c_string(&reason.replace('\0', " ")) {
            // SAFETY: the library copies the reason.
            unsafe {
                (api().rd_kafka_oauthbearer_set_token_failure)(self.raw.as_ptr(), reason.as_ptr())
            };
        }
    }

    /// Stop reading. May wait for the broker.
    pub fn close(&self) {
        // SAFETY: callable once or more; the queues that belong to it are still there.
        unsafe { (api().rd_kafka_consumer_close)(self.raw.as_ptr()) };
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: invariant 3. No callback runs after this, so `events` may go.
        unsafe { (api().rd_kafka_destroy_flags)(self.raw.as_ptr(), NO_CONSUMER_CLOSE) }
    }
}

/// # Safety
/// `conf` is a configuration that no client has taken.
unsafe fn set(conf: *mut RawConf, name: &str, value: Option<&str>) -> Result<(), KafkaError> {
    let (name, value) = (c_string(name)?, value.map(c_string).transpose()?);
    let value = value.as_ref().map_or(ptr::null(), |each| each.as_ptr());
    let mut text = [0 as c_char; ERROR_TEXT_BYTES];
    match (api().rd_kafka_conf_set)(conf, name.as_ptr(), value, text.as_mut_ptr(), text.len()) {
        0 => Ok(()),
        _ => Err(KafkaError::new(INVALID_ARG, text_of(text.as_ptr()))),
    }
}

/// # Safety
/// `count` elements are at `first`; with none, it may be null. They outlive the use of the slice.
unsafe fn slice<'a, T>(first: *const T, count: c_int) -> &'a [T] {
    if count <= 0 || first.is_null() {
        return &[];
    }
    std::slice::from_raw_parts(first, count as usize)
}

/// A queue of records and events.
pub struct Queue(NonNull<RawQueue>);

// SAFETY: librdkafka's queues are thread-safe.
unsafe impl Send for Queue {}
unsafe impl Sync for Queue {}

impl Queue {
    /// Whether there is neither a record nor an event in it.
    pub fn is_empty(&self) -> bool {
        // SAFETY: invariant 2.
        unsafe { (api().rd_kafka_queue_length)(self.0.as_ptr()) == 0 }
    }

    /// Append up to `most` messages to `into`. Waits until there are `most`, or for `timeout_ms`.
    pub fn take(
        &self,
        timeout_ms: i32,
        most: usize,
        into: &mut Vec<Message>,
    ) -> Result<usize, KafkaError> {
        into.reserve(most);
        let room = into.spare_capacity_mut().as_mut_ptr() as *mut *mut RawMessage;
        // SAFETY: there is room for `most` pointers, and a `Message` is a pointer (repr transparent).
        // The library writes as many as it returns, none of them null, and they are ours (invariant 1).
        unsafe {
            let taken =
                (api().rd_kafka_consume_batch_queue)(self.0.as_ptr(), timeout_ms, room, most);
            if taken < 0 {
                return Err(KafkaError::of_code((api().rd_kafka_last_error)()));
            }
            into.set_len(into.len() + taken as usize);
            Ok(taken as usize)
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: invariant 2.
        unsafe { (api().rd_kafka_queue_destroy)(self.0.as_ptr()) }
    }
}

/// A record, or an event. What it shows borrows from it.
#[repr(transparent)]
pub struct Message(NonNull<RawMessage>);

// SAFETY: a message belongs to its holder alone, and may be destroyed in any thread.
unsafe impl Send for Message {}
unsafe impl Sync for Message {}

impl Message {
    fn raw(&self) -> &RawMessage {
        // SAFETY: invariant 1.
        unsafe { self.0.as_ref() }
    }

    pub fn offset(&self) -> i64 {
        self.raw().offset
    }

    pub fn partition(&self) -> i32 {
        self.raw().partition
    }

    pub fn topic(&self) -> Option<String> {
        let topic = self.raw().topic;
        // SAFETY: the message holds its topic.
        (!topic.is_null()).then(|| unsafe { text_of((api().rd_kafka_topic_name)(topic)) })
    }

    pub fn is_event(&self) -> bool {
        self.raw().err != 0
    }

    /// The error of an event.
    pub fn error(&self) -> KafkaError {
        // SAFETY: invariant 1; the text belongs to the message.
        let text = unsafe { text_of((api().rd_kafka_message_errstr)(self.0.as_ptr())) };
        KafkaError::new(self.raw().err, text)
    }

    pub fn value(&self) -> Option<&[u8]> {
        let raw = self.raw();
        // SAFETY: a payload that is there has `len` bytes and lives as long as the message.
        (!raw.payload.is_null())
            .then(|| unsafe { std::slice::from_raw_parts(raw.payload as *const u8, raw.len) })
    }

    pub fn key(&self) -> Option<&[u8]> {
        let raw = self.raw();
        // SAFETY: as `value`.
        (!raw.key.is_null())
            .then(|| unsafe { std::slice::from_raw_parts(raw.key as *const u8, raw.key_len) })
    }

    /// Milliseconds since 1970.
    pub fn timestamp_ms(&self) -> Option<i64> {
        let mut kind: c_int = 0;
        // SAFETY: invariant 1.
        let stamp = unsafe { (api().rd_kafka_message_timestamp)(self.0.as_ptr(), &mut kind) };
        (kind != TIMESTAMP_NOT_AVAILABLE).then_some(stamp)
    }

    /// -1 if it is unknown.
    pub fn leader_epoch(&self) -> i32 {
        // SAFETY: invariant 1.
        unsafe { (api().rd_kafka_message_leader_epoch)(self.0.as_ptr()) }
    }

    /// Calls `each` with the name and the value of every header, in order.
    pub fn each_header(&self, mut each: impl FnMut(&CStr, Option<&[u8]>)) {
        let mut headers: *mut RawHeaders = ptr::null_mut();
        // SAFETY: the headers, their names and values belong to the message and live as long as it does.
        unsafe {
            if (api().rd_kafka_message_headers)(self.0.as_ptr(), &mut headers) != 0 {
                return;
            }
            for index in 0.. {
                let (mut name, mut value, mut len) = (ptr::null(), ptr::null(), 0usize);
                if (api().rd_kafka_header_get_all)(headers, index, &mut name, &mut value, &mut len)
                    != 0
                {
                    return;
                }
                let bytes =
                    (!value.is_null()).then(|| std::slice::from_raw_parts(value as *const u8, len));
                each(CStr::from_ptr(name), bytes);
            }
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: invariant 1.
        unsafe { (api().rd_kafka_message_destroy)(self.0.as_ptr()) }
    }
}
