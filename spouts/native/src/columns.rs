//! Records as Arrow's buffers.
//!
//! Offsets into buffers have 32 bits, as Arrow's `binary` has them. `Columns::has_room` keeps every
//! buffer below `BYTES_MAX`, so they cannot overflow.

use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::librdkafka::Message;

/// What one chunk may hold at most; far below what 32-bit offsets reach. A single record may have
/// more, up to Kafka's own limit of 2 GB.
const BYTES_MAX: usize = 1 << 30;

/// Bytes that Python may look into; shown read-only, owned here, freed with the last view of them.
#[pyclass(frozen)]
pub struct Buffer {
    data: Data,
}

enum Data {
    Bytes(Vec<u8>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
}

impl Data {
    fn pointer_and_len(&self) -> (*const u8, usize) {
        match self {
            Data::Bytes(data) => (data.as_ptr(), data.len()),
            Data::Int32(data) => (
                data.as_ptr() as *const u8,
                std::mem::size_of_val(data.as_slice()),
            ),
            Data::Int64(data) => (
                data.as_ptr() as *const u8,
                std::mem::size_of_val(data.as_slice()),
            ),
        }
    }
}

#[pymethods]
impl Buffer {
    /// # Safety
    /// `view` comes from Python's buffer protocol.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view"));
        }
        let (pointer, len) = slf.get().data.pointer_and_len();
        let len = isize::try_from(len).map_err(|_| PyBufferError::new_err("too large"))?;
        // SAFETY: the data never changes and is not moved: the class is frozen, and the view holds a
        // reference to this object. The call refuses writable views.
        let failed =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer as *mut _, len, 1, flags) };
        if failed != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }
}

fn bytes(data: Vec<u8>) -> Buffer {
    Buffer {
        data: Data::Bytes(data),
    }
}

/// Which values are there: one bit each, the lowest first. Takes no memory before the first null.
#[derive(Default)]
struct Validity {
    bits: Vec<u8>,
    len: usize,
    nulls: usize,
}

impl Validity {
    fn push(&mut self, is_there: bool) {
        if !is_there || self.nulls > 0 {
            self.bits.resize(self.len.div_ceil(8), 0xff); // does nothing after the first null
            if self.len.is_multiple_of(8) {
                self.bits.push(0xff);
            }
            if !is_there {
                self.bits[self.len / 8] &= !(1 << (self.len % 8));
                self.nulls += 1;
            }
        }
        self.len += 1;
    }

    fn finish(self) -> (Option<Buffer>, usize) {
        let nulls = self.nulls;
        ((nulls > 0).then(|| bytes(self.bits)), nulls)
    }
}

/// A column of `binary`.
struct Binary {
    data: Vec<u8>,
    ends: Vec<i32>,
    validity: Validity,
}

impl Binary {
    fn new(rows: usize, size: usize) -> Self {
        let mut ends = Vec::with_capacity(rows + 1);
        ends.push(0);
        Binary {
            data: Vec::with_capacity(size),
            ends,
            validity: Validity::default(),
        }
    }

    fn push(&mut self, value: Option<&[u8]>) {
        self.data.extend_from_slice(value.unwrap_or_default());
        self.ends.push(self.data.len() as i32); // `has_room` keeps it in range
        self.validity.push(value.is_some());
    }

    fn finish<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        let (validity, nulls) = self.validity.finish();
        found.set_item("validity", validity)?;
        found.set_item("nulls", nulls)?;
        found.set_item(
            "offsets",
            Buffer {
                data: Data::Int32(self.ends),
            },
        )?;
        found.set_item("data", bytes(self.data))?;
        Ok(found)
    }
}

/// A column of lists of (name, value).
struct Headers {
    ends: Vec<i32>,
    names: Binary,
    values: Binary,
}

struct Timestamps {
    stamps: Vec<i64>,
    validity: Validity,
}

/// Which columns are made, beside values and offsets.
#[derive(Clone, Copy, Default)]
pub struct Wanted {
    pub keys: bool,
    pub headers: bool,
    pub timestamps: bool,
    pub epochs: bool,
}

/// The columns of a chunk, row by row. The bytes of a record are copied once, into them.
pub struct Columns {
    values: Binary,
    keys: Option<Binary>,
    headers: Option<Headers>,
    timestamps: Option<Timestamps>,
    /// Leader epochs; below 0 for unknown ones.
    epochs: Option<Vec<i32>>,
    offsets: Vec<i64>,
    size: usize,
    /// The oldest and the newest timestamp of the records that `sample` was called with.
    sampled_ms: Option<(i64, i64)>,
}

/// A record that no column can hold.
pub struct TooLarge;

impl Columns {
    /// `rows`, `size`: as many are expected; it may become more or fewer.
    pub fn new(wanted: Wanted, rows: usize, size: usize) -> Self {
        Columns {
            values: Binary::new(rows, size),
            keys: wanted.keys.then(|| Binary::new(rows, 0)),
            headers: wanted.headers.then(|| {
                let mut ends = Vec::with_capacity(rows + 1);
                ends.push(0);
                Headers {
                    ends,
                    names: Binary::new(0, 0),
                    values: Binary::new(0, 0),
                }
            }),
            timestamps: wanted.timestamps.then(|| Timestamps {
                stamps: Vec::with_capacity(rows),
                validity: Validity::default(),
            }),
            epochs: wanted.epochs.then(|| Vec::with_capacity(rows)),
            offsets: Vec::with_capacity(rows),
            size: 0,
            sampled_ms: None,
        }
    }

    pub fn rows(&self) -> usize {
        self.offsets.len()
    }

    /// Bytes of values, keys and headers.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether the record fits into a chunk of `size_max` bytes. The first one always fits. Fails if
    /// no chunk can hold it.
    pub fn has_room(&self, message: &Message, size_max: usize) -> Result<bool, TooLarge> {
        let size = self.size_of(message);
        if size > i32::MAX as usize {
            return Err(TooLarge);
        }
        Ok(self.rows() == 0 || self.size + size <= size_max.min(BYTES_MAX))
    }

    fn size_of(&self, message: &Message) -> usize {
        let mut size = message.value().map_or(0, <[u8]>::len);
        if self.keys.is_some() {
            size += message.key().map_or(0, <[u8]>::len);
        }
        if self.headers.is_some() {
            // Three bytes for one: a name that is not UTF-8 is shown with replacement characters.
            message.each_header(|name, value| {
                size += 3 * name.to_bytes().len() + 8 + value.map_or(0, <[u8]>::len)
            });
        }
        size
    }

    /// Add a record, for which there is room.
    pub fn push(&mut self, message: &Message) {
        self.size += self.size_of(message);
        self.values.push(message.value());
        if let Some(keys) = &mut self.keys {
            keys.push(message.key());
        }
        if let Some(Headers {
            ends,
            names,
            values,
        }) = &mut self.headers
        {
            message.each_header(|name, value| {
                names.push(Some(name.to_str().unwrap_or("\u{FFFD}").as_bytes())); // as the Python reader
                values.push(value);
            });
            ends.push(names.ends.len() as i32 - 1);
        }
        if let Some(Timestamps { stamps, validity }) = &mut self.timestamps {
            let stamp = message.timestamp_ms();
            stamps.push(stamp.unwrap_or(0));
            validity.push(stamp.is_some());
        }
        if let Some(epochs) = &mut self.epochs {
            epochs.push(message.leader_epoch());
        }
        self.offsets.push(message.offset());
    }

    /// Take the time of a record into `sampled_ms`. For a few records of a chunk: asking for all
    /// times would cost something for each record.
    pub fn sample(&mut self, message: &Message) {
        if let Some(stamp) = message.timestamp_ms() {
            let (oldest, newest) = self.sampled_ms.unwrap_or((stamp, stamp));
            self.sampled_ms = Some((oldest.min(stamp), newest.max(stamp)));
        }
    }

    /// The buffers by column, the bytes of the values, and the times of the sampled records.
    pub fn finish<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        found.set_item("rows", self.offsets.len())?;
        found.set_item("value_bytes", self.values.data.len())?;
        found.set_item("sampled_ms", self.sampled_ms)?;
        found.set_item("values", self.values.finish(py)?)?;
        found.set_item(
            "offsets",
            Buffer {
                data: Data::Int64(self.offsets),
            },
        )?;
        if let Some(keys) = self.keys {
            found.set_item("keys", keys.finish(py)?)?;
        }
        if let Some(headers) = self.headers {
            let columns = PyDict::new(py);
            columns.set_item(
                "offsets",
                Buffer {
                    data: Data::Int32(headers.ends),
                },
            )?;
            columns.set_item("rows", headers.names.ends.len() - 1)?;
            columns.set_item("names", headers.names.finish(py)?)?;
            columns.set_item("values", headers.values.finish(py)?)?;
            found.set_item("headers", columns)?;
        }
        if let Some(timestamps) = self.timestamps {
            let columns = PyDict::new(py);
            let (validity, nulls) = timestamps.validity.finish();
            columns.set_item("validity", validity)?;
            columns.set_item("nulls", nulls)?;
            columns.set_item(
                "data",
                Buffer {
                    data: Data::Int64(timestamps.stamps),
                },
            )?;
            found.set_item("timestamps", columns)?;
        }
        if let Some(epochs) = self.epochs {
            found.set_item(
                "epochs",
                Buffer {
                    data: Data::Int32(epochs),
                },
            )?;
        }
        Ok(found)
    }
}

/// A record, as tests compare it. A part that was not wanted is empty.
#[cfg(test)]
#[derive(Debug, PartialEq)]
pub struct Row {
    pub offset: i64,
    pub value: Option<Vec<u8>>,
    pub key: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp_ms: Option<i64>,
}

#[cfg(test)]
impl Row {
    pub fn part(&self, wanted: Wanted) -> Row {
        Row {
            offset: self.offset,
            value: self.value.clone(),
            key: self.key.clone().filter(|_| wanted.keys),
            headers: match wanted.headers {
                true => self.headers.clone(),
                false => Vec::new(),
            },
            timestamp_ms: self.timestamp_ms.filter(|_| wanted.timestamps),
        }
    }
}

#[cfg(test)]
impl Validity {
    fn has(&self, index: usize) -> bool {
        assert!(index < self.len);
        self.nulls == 0 || self.bits[index / 8] & (1 << (index % 8)) != 0
    }
}

#[cfg(test)]
impl Binary {
    fn value(&self, index: usize) -> Option<Vec<u8>> {
        let bytes = self.data[self.ends[index] as usize..self.ends[index + 1] as usize].to_vec();
        assert!(self.validity.has(index) || bytes.is_empty());
        self.validity.has(index).then_some(bytes)
    }
}

#[cfg(test)]
impl Columns {
    /// What the buffers say of a row.
    pub fn row(&self, index: usize) -> Row {
        let headers = self.headers.as_ref().map_or(Vec::new(), |headers| {
            (headers.ends[index] as usize..headers.ends[index + 1] as usize)
                .map(|each| {
                    let name = headers.names.value(each).unwrap();
                    (String::from_utf8(name).unwrap(), headers.values.value(each))
                })
                .collect()
        });
        Row {
            offset: self.offsets[index],
            value: self.values.value(index),
            key: self.keys.as_ref().and_then(|keys| keys.value(index)),
            headers,
            timestamp_ms: self.timestamps.as_ref().and_then(|timestamps| {
                timestamps
                    .validity
                    .has(index)
                    .then_some(timestamps.stamps[index])
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Validity;

    #[test]
    fn validity_has_a_zero_for_every_null() {
        for first_null in 0..20 {
            let mut validity = Validity::default();
            let there: Vec<bool> = (0..30)
                .map(|index| index < first_null || index % 3 == 0)
                .collect();
            there.iter().for_each(|each| validity.push(*each));
            let found: Vec<bool> = (0..30)
                .map(|index| validity.bits[index / 8] & (1 << (index % 8)) != 0)
                .collect();
            assert_eq!(found, there);
            assert_eq!(validity.nulls, there.iter().filter(|each| !**each).count());
            assert_eq!(validity.bits.len(), 4);
        }
    }

    #[test]
    fn without_nulls_there_are_no_bits() {
        let mut validity = Validity::default();
        (0..100).for_each(|_| validity.push(true));
        assert!(validity.bits.is_empty());
    }
}
