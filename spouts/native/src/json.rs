//! JSON objects in an Arrow binary array to Arrow buffers, without a Python object per value.
//!
//! `columns` reads. What is here are the Python class, the buffers that come in and those that go
//! out. `spouts.codecs.json_native` describes the schema and makes Arrow arrays of the buffers.

mod columns;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use columns::{Cells, Column, Field, Kind, Number, Object};

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<JsonReader>()
}

/// Reads JSON objects into the columns of a schema.
///
/// `fields`: for each field its name, its type, whether it may be null, and its child fields in the
/// same form. Types: what Arrow calls `int8` to `int64`, `uint8` to `uint64`, `float`, `double`,
/// `bool`, `string`, `struct` (with its fields) and `list` (with its one item). Raises `ValueError`
/// for another type.
#[pyclass(frozen, module = "spouts._native")]
struct JsonReader {
    fields: Vec<Field>,
}

#[pymethods]
impl JsonReader {
    #[new]
    fn new(fields: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        Ok(JsonReader {
            fields: fields.iter().map(field).collect::<PyResult<_>>()?,
        })
    }

    /// Reads `length` values of a binary array from its entry `first` on. `offsets` are 32 bits
    /// wide. `validity` is a bitmap, or None if no value is null; a null makes a row of nulls.
    ///
    /// Returns the number of rows, the columns, and the indices of the unusual values as 64-bit
    /// integers in bytes: they have no row, and Arrow's reader must say what they are. A column is
    /// its number of nulls, its bitmap (None without nulls), its other buffers, and its children.
    /// Other threads run meanwhile. Raises `ValueError` if the buffers do not fit each other.
    fn read<'py>(
        &self,
        py: Python<'py>,
        values: &Bound<'py, PyAny>,
        offsets: &Bound<'py, PyAny>,
        validity: Option<&Bound<'py, PyAny>>,
        first: usize,
        length: usize,
    ) -> PyResult<(usize, Bound<'py, PyTuple>, Bound<'py, PyBytes>)> {
        let values = PyUntypedBuffer::get(values)?;
        let offsets = PyUntypedBuffer::get(offsets)?;
        let validity = validity.map(PyUntypedBuffer::get).transpose()?;
        let input = Input {
            values: lent(&values)?,
            offsets: lent(&offsets)?,
            validity: validity.as_ref().map(lent).transpose()?,
        };
        let (object, unusual) = py
            .detach(|| input.read(&self.fields, first, length))
            .ok_or_else(|| PyValueError::new_err("the buffers are not those of a binary array"))?;
        let rows = object.rows();
        let columns = object
            .columns
            .into_iter()
            .map(|column| exported(py, column))
            .collect::<PyResult<Vec<_>>>()?;
        Ok((rows, PyTuple::new(py, columns)?, PyBytes::new(py, &unusual)))
    }
}

/// The bytes of a buffer, for as long as the buffer is borrowed.
fn lent(buffer: &PyUntypedBuffer) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("a buffer is not contiguous"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the pointer and the length are those of a contiguous buffer that is not empty. Python
    // keeps it in place until `buffer` is dropped. Nobody writes to the memory of an Arrow array.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) })
}

/// The buffers of a binary array.
struct Input<'a> {
    values: &'a [u8],
    offsets: &'a [u8],
    validity: Option<&'a [u8]>,
}

impl<'a> Input<'a> {
    /// The rows, and the indices of the unusual values, counted from `first`. None if the buffers
    /// do not fit each other.
    fn read(&self, fields: &[Field], first: usize, length: usize) -> Option<(Object, Vec<u8>)> {
        let mut object = Object::new(fields, length.min(self.offsets.len() / 4));
        let mut unusual = Vec::new();
        let mut tape = Vec::new();
        for index in 0..length {
            match self.value(first.checked_add(index)?)? {
                None => object.add_nulls(),
                Some(value) => {
                    if !object.add(value, &mut tape) {
                        unusual.extend_from_slice(&(index as i64).to_ne_bytes());
                    }
                }
            }
        }
        Some((object, unusual))
    }

    /// A value, which is None if it is null. None if it is not there.
    fn value(&self, index: usize) -> Option<Option<&'a [u8]>> {
        if let Some(bits) = self.validity {
            if bits.get(index / 8)? >> (index % 8) & 1 == 0 {
                return Some(None);
            }
        }
        let begin = self.offset(index)?;
        let end = self.offset(index + 1)?;
        Some(Some(self.values.get(begin..end)?))
    }

    fn offset(&self, index: usize) -> Option<usize> {
        let at = index.checked_mul(4)?;
        let bytes = self.offsets.get(at..at.checked_add(4)?)?;
        usize::try_from(i32::from_ne_bytes(bytes.try_into().ok()?)).ok()
    }
}

fn field(described: &Bound<'_, PyAny>) -> PyResult<Field> {
    let (name, kind, nullable, children): (String, String, bool, Vec<Bound<'_, PyAny>>) =
        described.extract()?;
    let children = children.iter().map(field).collect::<PyResult<Vec<_>>>()?;
    let kind = match (kind.as_str(), children.len()) {
        ("int8", 0) => Kind::Number(Number::Int8),
        ("int16", 0) => Kind::Number(Number::Int16),
        ("int32", 0) => Kind::Number(Number::Int32),
        ("int64", 0) => Kind::Number(Number::Int64),
        ("uint8", 0) => Kind::Number(Number::UInt8),
        ("uint16", 0) => Kind::Number(Number::UInt16),
        ("uint32", 0) => Kind::Number(Number::UInt32),
        ("uint64", 0) => Kind::Number(Number::UInt64),
        ("float", 0) => Kind::Number(Number::Float),
        ("double", 0) => Kind::Number(Number::Double),
        ("bool", 0) => Kind::Bool,
        ("string", 0) => Kind::Text,
        ("struct", _) => Kind::Struct(children),
        ("list", 1) => Kind::List(Box::new(children[0].clone())),
        (other, _) => {
            return Err(PyValueError::new_err(format!(
                "{name}: the type {other} is not known"
            )))
        }
    };
    Ok(Field {
        name,
        kind,
        required: !nullable,
    })
}

/// A column as Python gets it: see `JsonReader.read`.
fn exported(py: Python<'_>, column: Column) -> PyResult<Bound<'_, PyTuple>> {
    let nulls = column.valid.iter().filter(|valid| !**valid).count();
    let bitmap = (nulls > 0).then(|| PyBytes::new(py, &packed(&column.valid)));
    let mut children = Vec::new();
    let buffers = match column.cells {
        Cells::Number { bytes, .. } => vec![PyBytes::new(py, &bytes)],
        Cells::Bool(values) => vec![PyBytes::new(py, &packed(&values))],
        Cells::Text { bytes, ends } => vec![offsets(py, &ends)?, PyBytes::new(py, &bytes)],
        Cells::Struct(object) => {
            for child in object.columns {
                children.push(exported(py, child)?);
            }
            Vec::new()
        }
        Cells::List { items, ends } => {
            children.push(exported(py, *items)?);
            vec![offsets(py, &ends)?]
        }
    };
    (
        column.valid.len(),
        nulls,
        bitmap,
        PyTuple::new(py, buffers)?,
        PyTuple::new(py, children)?,
    )
        .into_pyobject(py)
}

fn offsets<'py>(py: Python<'py>, ends: &[i32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, ends.len() * 4, |bytes| {
        for (each, end) in bytes.chunks_exact_mut(4).zip(ends) {
            each.copy_from_slice(&end.to_ne_bytes());
        }
        Ok(())
    })
}

/// One bit for each value, the lowest first.
fn packed(values: &[bool]) -> Vec<u8> {
    values
        .chunks(8)
        .map(|bits| {
            bits.iter()
                .enumerate()
                .fold(0, |byte, (place, bit)| byte | u8::from(*bit) << place)
        })
        .collect()
}
