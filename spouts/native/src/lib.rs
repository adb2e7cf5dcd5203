//! The part of the spouts that is compiled: what costs too much per record in Python.
//!
//! It is optional. Where it was not built, the Python code beside it does the same, slower.

mod columns;
mod json;
mod librdkafka;
mod reader;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    json::register(module)?;
    reader::register(module)
}
