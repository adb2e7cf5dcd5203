//! JSON objects as columns of a declared schema: the loop over the fields of each value.
//!
//! `jiter` parses. What is here knows the schema, and two more things:
//!
//! 1. **Only what is usual is decoded.** Arrow's reader decides what every value means. Where it
//!    might see a value in another way than `jiter` does, or refuses it, the value is unusual: it
//!    leaves no row, and the caller gives it to Arrow's reader. Unusual are: whatever `jiter`
//!    refuses, a value of another type than declared, a number that does not parse as that type, a
//!    number with more than 64 characters or an exponent of three digits, a declared key given
//!    twice, null or nothing where a value is required.
//! 2. **Keys tend to come in the same order.** The bytes between two values (comma, key, colon)
//!    are compared with those of the value before. If they are the same, the key is known without
//!    parsing it: the same bytes in the same place parse in the same way.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::str::FromStr;

use jiter::{Jiter, NumberInt, Peek};

/// Longer numbers, and exponents of more digits, go to Arrow: its reader has limits there.
const NUMBER_CHARACTERS_MAX: usize = 64;
const EXPONENT_DIGITS_MAX: usize = 2;

/// How many keys of an object are expected where they were in the one before, and how long ones.
const STEPS_MAX: usize = 256;
const STEP_BYTES_MAX: usize = 256;
/// As many of a key's bytes are compared at once.
const HEAD_BYTES: usize = 16;

/// A field of the schema.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    pub kind: Kind,
    /// A value that has null here, or nothing, is unusual.
    pub required: bool,
}

#[derive(Clone, Debug)]
pub enum Kind {
    Number(Number),
    Bool,
    /// UTF-8, also for a binary column.
    Text,
    Struct(Vec<Field>),
    List(Box<Field>),
}

#[derive(Clone, Copy, Debug)]
pub enum Number {
    Int8,
    Int16,
    Int32,
    Int64,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    Float,
    Double,
}

/// The rows of a field. Every row has an entry in `valid`, and one in `cells`.
pub struct Column {
    required: bool,
    pub valid: Vec<bool>,
    pub cells: Cells,
}

pub enum Cells {
    /// The numbers one after the other, in the machine's own order of bytes.
    Number {
        number: Number,
        bytes: Vec<u8>,
    },
    Bool(Vec<bool>),
    /// `ends` begins with 0, here and in lists: offsets as Arrow wants them.
    Text {
        bytes: Vec<u8>,
        ends: Vec<i32>,
    },
    Struct(Object),
    List {
        items: Box<Column>,
        ends: Vec<i32>,
    },
}

/// The columns of objects, at the root or nested.
pub struct Object {
    names: HashMap<Vec<u8>, usize>,
    pub columns: Vec<Column>,
    rows: usize,
    /// The keys of the object before, in their order.
    steps: Vec<Step>,
}

/// A key with all that surrounds it, from the end of one value to the colon before the next.
struct Step {
    bytes: Vec<u8>,
    /// The first bytes of `bytes`, and which bits of a word are theirs.
    head: u128,
    mask: u128,
    /// The column; none for a key that was not declared.
    column: Option<usize>,
}

impl Step {
    fn new(bytes: &[u8], column: Option<usize>) -> Self {
        let mut head = [0; HEAD_BYTES];
        let mut mask = [0; HEAD_BYTES];
        for (place, byte) in bytes.iter().take(HEAD_BYTES).enumerate() {
            head[place] = *byte;
            mask[place] = u8::MAX;
        }
        Step {
            bytes: bytes.to_vec(),
            head: u128::from_ne_bytes(head),
            mask: u128::from_ne_bytes(mask),
            column,
        }
    }

    /// Whether `text` begins with the bytes.
    #[inline]
    fn is_next(&self, text: &[u8]) -> bool {
        match text.first_chunk() {
            Some(head) => {
                u128::from_ne_bytes(*head) & self.mask == self.head
                    && (self.bytes.len() <= HEAD_BYTES || text.starts_with(&self.bytes))
            }
            None => text.starts_with(&self.bytes),
        }
    }
}

impl Object {
    /// Makes room for `rows` rows, though not for their texts and lists.
    pub fn new(fields: &[Field], rows: usize) -> Self {
        Object {
            names: (0..)
                .zip(fields)
                .map(|(index, field)| (field.name.clone().into_bytes(), index))
                .collect(),
            columns: fields
                .iter()
                .map(|field| Column::new(field, rows))
                .collect(),
            rows: 0,
            steps: Vec::new(),
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds a row for a value, which must be one object. Returns whether it did: it adds none for a
    /// value that is unusual. `tape` is for texts with escapes; it is kept for its memory only.
    pub fn add(&mut self, value: &[u8], tape: &mut Vec<u8>) -> bool {
        let rows = self.rows;
        let end = self.read(value, 0, tape);
        if end.is_some_and(|end| end == value.len() || Jiter::new(&value[end..]).finish().is_ok()) {
            return true;
        }
        self.truncate(rows);
        false
    }

    /// Adds a row of nulls, in required fields too.
    pub fn add_nulls(&mut self) {
        for column in &mut self.columns {
            column.add_empty();
        }
        self.rows += 1;
    }

    /// Reads the object that begins at `at`. Returns where it ends, or nothing if it is unusual:
    /// then the columns may hold a part of the row.
    fn read(&mut self, text: &[u8], mut at: usize, tape: &mut Vec<u8>) -> Option<usize> {
        let mut step = 0;
        loop {
            let rest = text.get(at..)?;
            let column = match self.steps.get(step) {
                Some(known) if known.is_next(rest) => {
                    at += known.bytes.len();
                    known.column
                }
                _ => {
                    let mut parser = Jiter::new(rest);
                    let key = if step == 0 {
                        parser.next_object_bytes()
                    } else {
                        parser.next_key_bytes()
                    };
                    let Some(key) = key.ok()? else {
                        at += parser.current_index();
                        break;
                    };
                    let column = if key.contains(&b'\\') {
                        let mut parser = Jiter::new(rest);
                        let key = if step == 0 {
                            parser.next_object()
                        } else {
                            parser.next_key()
                        };
                        self.names.get(key.ok()??.as_bytes()).copied()
                    } else {
                        self.names.get(key).copied()
                    };
                    let length = parser.current_index();
                    self.learn(step, &rest[..length], column);
                    at += length;
                    column
                }
            };
            at = match column {
                Some(index) => {
                    let column = &mut self.columns[index];
                    if column.len() != self.rows {
                        return None;
                    }
                    column.read(text, at, tape)?
                }
                None => skip(text, at)?,
            };
            step += 1;
            if text.get(at) == Some(&b'}') {
                at += 1;
                break;
            }
        }
        for column in &mut self.columns {
            if column.len() == self.rows {
                column.add_null()?;
            }
        }
        self.rows += 1;
        Some(at)
    }

    fn learn(&mut self, step: usize, bytes: &[u8], column: Option<usize>) {
        if step >= STEPS_MAX || bytes.len() > STEP_BYTES_MAX {
            return;
        }
        let learnt = Step::new(bytes, column);
        if step < self.steps.len() {
            self.steps[step] = learnt;
        } else if step == self.steps.len() {
            self.steps.push(learnt);
        }
    }

    fn truncate(&mut self, rows: usize) {
        for column in &mut self.columns {
            column.truncate(rows);
        }
        self.rows = rows;
    }
}

impl Column {
    fn new(field: &Field, rows: usize) -> Self {
        let cells = match &field.kind {
            Kind::Number(number) => Cells::Number {
                number: *number,
                bytes: Vec::with_capacity(rows * number.width()),
            },
            Kind::Bool => Cells::Bool(Vec::with_capacity(rows)),
            Kind::Text => Cells::Text {
                bytes: Vec::new(),
                ends: first_offset(rows),
            },
            Kind::Struct(fields) => Cells::Struct(Object::new(fields, rows)),
            Kind::List(item) => Cells::List {
                items: Box::new(Column::new(item, 0)),
                ends: first_offset(rows),
            },
        };
        Column {
            required: field.required,
            valid: Vec::with_capacity(rows),
            cells,
        }
    }

    pub fn len(&self) -> usize {
        self.valid.len()
    }

    /// Reads the value that begins at `at`, or after whitespace there. Returns where it ends, or
    /// nothing if it is unusual.
    fn read(&mut self, text: &[u8], at: usize, tape: &mut Vec<u8>) -> Option<usize> {
        let rest = text.get(at..)?;
        let mut parser = Jiter::new(rest);
        let peek = parser.peek().ok()?;
        let end = match &mut self.cells {
            _ if peek == Peek::Null => {
                parser.known_null().ok()?;
                self.add_null()?;
                return Some(at + parser.current_index());
            }
            Cells::Number { number, bytes } if peek.is_num() => {
                number.read(&mut parser, peek, bytes)?;
                at + parser.current_index()
            }
            Cells::Bool(values) if peek == Peek::True || peek == Peek::False => {
                values.push(parser.known_bool(peek).ok()?);
                at + parser.current_index()
            }
            Cells::Text { bytes, ends } if peek == Peek::String => {
                let begin = parser.current_index();
                let mut parser = Jiter::with_tape(&rest[begin..], std::mem::take(tape));
                bytes.extend_from_slice(parser.known_str().ok()?.as_bytes());
                ends.push(i32::try_from(bytes.len()).ok()?);
                let end = at + begin + parser.current_index();
                *tape = parser.into_tape();
                end
            }
            Cells::Struct(object) if peek == Peek::Object => object.read(text, at, tape)?,
            Cells::List { items, ends } if peek == Peek::Array => {
                let mut more = parser.known_array().ok()?.is_some();
                let mut end = at + parser.current_index();
                while more {
                    end = items.read(text, end, tape)?;
                    let mut parser = Jiter::new(text.get(end..)?);
                    more = parser.array_step().ok()?.is_some();
                    end += parser.current_index();
                }
                ends.push(i32::try_from(items.len()).ok()?);
                end
            }
            _ => return None,
        };
        self.valid.push(true);
        Some(end)
    }

    fn add_null(&mut self) -> Option<()> {
        if self.required {
            return None;
        }
        if let Cells::Struct(object) = &mut self.cells {
            for column in &mut object.columns {
                column.add_null()?;
            }
            object.rows += 1;
            self.valid.push(false);
        } else {
            self.add_empty();
        }
        Some(())
    }

    /// Adds null, also where a value is required.
    fn add_empty(&mut self) {
        match &mut self.cells {
            Cells::Number { number, bytes } => bytes.resize(bytes.len() + number.width(), 0),
            Cells::Bool(values) => values.push(false),
            Cells::Text { ends, .. } | Cells::List { ends, .. } => ends.push(ends[ends.len() - 1]),
            Cells::Struct(object) => object.add_nulls(),
        }
        self.valid.push(false);
    }

    /// Removes the rows from `rows` on, also one of which only a part is there.
    fn truncate(&mut self, rows: usize) {
        self.valid.truncate(rows);
        match &mut self.cells {
            Cells::Number { number, bytes } => bytes.truncate(rows * number.width()),
            Cells::Bool(values) => values.truncate(rows),
            Cells::Text { bytes, ends } => {
                ends.truncate(rows + 1);
                bytes.truncate(ends[rows] as usize);
            }
            Cells::Struct(object) => object.truncate(rows),
            Cells::List { items, ends } => {
                ends.truncate(rows + 1);
                items.truncate(ends[rows] as usize);
            }
        }
    }
}

impl Number {
    fn width(self) -> usize {
        match self {
            Number::Int8 | Number::UInt8 => 1,
            Number::Int16 | Number::UInt16 => 2,
            Number::Int32 | Number::UInt32 | Number::Float => 4,
            Number::Int64 | Number::UInt64 | Number::Double => 8,
        }
    }

    /// Appends the number that is next, exactly rounded. Returns nothing if it is unusual for this
    /// type.
    fn read(self, parser: &mut Jiter, peek: Peek, bytes: &mut Vec<u8>) -> Option<()> {
        match self {
            Number::Int8 => bytes.extend_from_slice(&signed::<i8>(parser, peek)?.to_ne_bytes()),
            Number::Int16 => bytes.extend_from_slice(&signed::<i16>(parser, peek)?.to_ne_bytes()),
            Number::Int32 => bytes.extend_from_slice(&signed::<i32>(parser, peek)?.to_ne_bytes()),
            Number::Int64 => bytes.extend_from_slice(&signed::<i64>(parser, peek)?.to_ne_bytes()),
            Number::UInt8 => bytes.extend_from_slice(&unsigned::<u8>(parser, peek)?.to_ne_bytes()),
            Number::UInt16 => {
                bytes.extend_from_slice(&unsigned::<u16>(parser, peek)?.to_ne_bytes())
            }
            Number::UInt32 => {
                bytes.extend_from_slice(&unsigned::<u32>(parser, peek)?.to_ne_bytes())
            }
            Number::UInt64 => {
                bytes.extend_from_slice(&unsigned::<u64>(parser, peek)?.to_ne_bytes())
            }
            Number::Float => {
                let value: f32 = float(parser, peek)?;
                bytes.extend_from_slice(&value.is_finite().then_some(value)?.to_ne_bytes());
            }
            Number::Double => {
                let value: f64 = float(parser, peek)?;
                bytes.extend_from_slice(&value.is_finite().then_some(value)?.to_ne_bytes());
            }
        }
        Some(())
    }
}

/// The integer that is next, without fraction or exponent.
#[inline]
fn signed<T: TryFrom<i64> + FromStr>(parser: &mut Jiter, peek: Peek) -> Option<T> {
    match parser.known_int(peek) {
        Ok(NumberInt::Int(value)) => T::try_from(value).ok(),
        // It has 19 digits or more, or is no integer. The parser has not moved.
        Err(_) => parsed(parser.known_number_bytes(peek).ok()?),
    }
}

/// Arrow's reader takes -0 for a signed integer, and refuses it for an unsigned one.
#[inline]
fn unsigned<T: TryFrom<i64> + FromStr>(parser: &mut Jiter, peek: Peek) -> Option<T> {
    if peek == Peek::Minus {
        return None;
    }
    signed(parser, peek)
}

fn float<T: FromStr>(parser: &mut Jiter, peek: Peek) -> Option<T> {
    let text = parser.known_number_bytes(peek).ok()?;
    if is_plain(text) {
        parsed(text)
    } else {
        None
    }
}

fn parsed<T: FromStr>(number: &[u8]) -> Option<T> {
    std::str::from_utf8(number).ok()?.parse().ok()
}

fn first_offset(rows: usize) -> Vec<i32> {
    let mut ends = Vec::with_capacity(rows + 1);
    ends.push(0);
    ends
}

/// Whether a JSON number is far from the limits of Arrow's reader.
#[inline]
fn is_plain(number: &[u8]) -> bool {
    // The letter of a longer exponent is not among the last bytes, nor is it the first.
    let last = number.len().saturating_sub(EXPONENT_DIGITS_MAX + 1).max(1);
    number.len() <= NUMBER_CHARACTERS_MAX
        && (!number[1..last]
            .iter()
            .any(|byte| matches!(byte, b'e' | b'E'))
            || has_short_exponent(number))
}

fn has_short_exponent(number: &[u8]) -> bool {
    number
        .iter()
        .rev()
        .take_while(|byte| byte.is_ascii_digit())
        .count()
        <= EXPONENT_DIGITS_MAX
}

/// Checks the value of a key that is not declared, and returns where it ends; nothing if it is
/// unusual. Arrow's reader checks such values too, except that texts are UTF-8.
fn skip(text: &[u8], at: usize) -> Option<usize> {
    let mut parser = Jiter::new(text.get(at..)?);
    let peek = parser.peek().ok()?;
    if peek == Peek::String {
        parser.known_bytes().ok()?;
    } else if peek.is_num() {
        if !is_plain(parser.known_number_bytes(peek).ok()?) {
            return None;
        }
    } else {
        let begin = parser.current_index();
        parser.known_skip(peek).ok()?;
        if !has_plain_numbers(parser.slice_to_current(begin)) {
            return None;
        }
    }
    Some(at + parser.current_index())
}

/// Whether all numbers in a valid JSON array or object are plain.
fn has_plain_numbers(value: &[u8]) -> bool {
    let mut rest = value;
    while let Some(&byte) = rest.first() {
        let length = match byte {
            b'"' => text_length(rest),
            b'-' | b'0'..=b'9' => {
                let end = rest.iter().position(|byte| {
                    !matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')
                });
                let length = end.unwrap_or(rest.len());
                if !is_plain(&rest[..length]) {
                    return false;
                }
                length
            }
            _ => 1,
        };
        rest = &rest[length..];
    }
    true
}

/// The length of the JSON text that `rest` begins with, in bytes, with its quotation marks.
fn text_length(rest: &[u8]) -> usize {
    let mut escaped = false;
    for (index, byte) in rest.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, the same ones for the same seed (xorshift).
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, limit: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % limit as u64) as usize
        }
    }

    const PUNCTUATION: &[u8] = br#"{}[],:"\0-.eE"#;
    const VALUES: [&[u8]; 4] = [
        br#"{"word":"a","amount":-7,"share":1.5e3,"ok":true,"point":{"x":255,"word":"b"},"list":[[1],null,[]]}"#,
        br#" { "list" : [ [ 1 , 2 ] ] , "other" : { "x" : [ 1e5 , "\u00e4\ud83d\ude00" , null ] } , "word" : "\n" } "#,
        br#"{"amount":9223372036854775807,"share":1234567890.123456789,"point":null,"ok":null,"other":"\""}"#,
        b"{}",
    ];

    fn fields() -> Vec<Field> {
        let field = |name: &str, kind| Field {
            name: name.to_string(),
            kind,
            required: false,
        };
        let list = |item| Kind::List(Box::new(item));
        vec![
            field("word", Kind::Text),
            field("amount", Kind::Number(Number::Int64)),
            field("share", Kind::Number(Number::Double)),
            field("ok", Kind::Bool),
            field(
                "point",
                Kind::Struct(vec![
                    field("x", Kind::Number(Number::UInt8)),
                    field("word", Kind::Text),
                ]),
            ),
            field(
                "list",
                list(field(
                    "item",
                    list(field("item", Kind::Number(Number::Int32))),
                )),
            ),
        ]
    }

    /// Every column has as many entries as rows; offsets do not fall and stay inside.
    fn check(column: &Column, rows: usize) {
        assert_eq!(column.len(), rows);
        match &column.cells {
            Cells::Number { number, bytes } => assert_eq!(bytes.len(), rows * number.width()),
            Cells::Bool(values) => assert_eq!(values.len(), rows),
            Cells::Text { bytes, ends } => {
                check_offsets(ends, rows, bytes.len());
                let whole = std::str::from_utf8(bytes).expect("UTF-8");
                assert!(ends.iter().all(|end| whole.is_char_boundary(*end as usize)));
            }
            Cells::Struct(object) => {
                assert_eq!(object.rows(), rows);
                object.columns.iter().for_each(|column| check(column, rows));
            }
            Cells::List { items, ends } => {
                check_offsets(ends, rows, items.len());
                check(items, items.len());
            }
        }
    }

    fn check_offsets(ends: &[i32], rows: usize, length: usize) {
        assert_eq!(
            (ends.len(), ends[0], ends[rows] as usize),
            (rows + 1, 0, length)
        );
        assert!(ends.windows(2).all(|pair| pair[0] <= pair[1]));
    }

    #[test]
    fn random_bytes_leave_whole_rows_or_none() {
        let number = |name: &str, otherwise: u64| {
            std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
        };
        let mut dice = Dice(0x9E37_79B9_7F4A_7C15 ^ number("RATCHET_FUZZ_SEED", 0));
        let mut tape = Vec::new();
        for _ in 0..number("RATCHET_FUZZ_ROUNDS", 200) {
            let mut object = Object::new(&fields(), 0);
            let mut rows = 0;
            for _ in 0..2_000 {
                let mut value = VALUES[dice.below(VALUES.len())].to_vec();
                for _ in 0..dice.below(4) {
                    let at = dice.below(value.len() + 1);
                    match dice.below(5) {
                        0 => value.truncate(at),
                        1 => value.insert(at, dice.below(256) as u8),
                        2 => value.insert(at, PUNCTUATION[dice.below(PUNCTUATION.len())]),
                        3 => value.extend_from_slice(VALUES[dice.below(VALUES.len())]),
                        _ => value = (0..dice.below(40)).map(|_| dice.below(256) as u8).collect(),
                    }
                }
                rows += usize::from(object.add(&value, &mut tape));
                assert_eq!(object.rows(), rows);
            }
            object.add_nulls();
            assert!(rows > 200);
            object
                .columns
                .iter()
                .for_each(|column| check(column, rows + 1));
        }
    }

    #[test]
    fn values_as_they_should_be_are_usual() {
        let mut object = Object::new(&fields(), VALUES.len());
        for value in VALUES {
            assert!(object.add(value, &mut Vec::new()));
        }
    }

    #[test]
    fn numbers_near_the_limits_of_arrows_reader_are_not_plain() {
        for number in [
            "0",
            "-1",
            "1e5",
            "1E-99",
            "1.5e+99",
            "123456789.123456789",
            "-0.0e00",
        ] {
            assert!(is_plain(number.as_bytes()), "{number}");
            assert!(
                has_plain_numbers(format!("[{number}]").as_bytes()),
                "{number}"
            );
        }
        for number in [
            "1e100",
            "1e005",
            "-1.5E-100",
            "1e+100",
            "0e400",
            &"1".repeat(65),
        ] {
            assert!(!is_plain(number.as_bytes()), "{number}");
            assert!(
                !has_plain_numbers(format!(r#"{{"a\"":[true,{number}]}}"#).as_bytes()),
                "{number}"
            );
        }
        assert!(has_plain_numbers(br#"["1e400","\\",{"1e400":"\"1e400"}]"#));
    }
}
