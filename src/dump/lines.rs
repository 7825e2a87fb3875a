//! Lines of a text stream, one at a time, with an upper limit on their length.

use std::io::{BufRead, Read};

use super::error::DumpError;

/// Longest line that is read, in bytes. The longest of the compiler's own lines, a large constant of an
/// HLO text, stay below a megabyte.
const LONGEST_LINE: u64 = 8 << 20;

/// Reads a stream line by line and knows where it is.
pub(super) struct Lines<'a, R> {
    name: &'a str,
    stream: R,
    buffer: Vec<u8>,
    number: usize,
}

impl<'a, R: BufRead> Lines<'a, R> {
    /// Starts before the first line. `name` is the path that errors show.
    pub(super) fn new(name: &'a str, stream: R) -> Self {
        Self {
            name,
            stream,
            buffer: Vec::new(),
            number: 0,
        }
    }

    /// Number of the line that was read last, from 1; 0 before the first.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// The next line without its end, or `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream fails, or what it holds is not text.
    pub(super) fn next(&mut self) -> Result<Option<&str>, DumpError> {
        self.buffer.clear();
        let read = (&mut self.stream)
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut self.buffer)
            .map_err(|source| DumpError::read(self.name, source))?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        if self.buffer.last() == Some(&b'\n') {
            self.buffer.pop();
            if self.buffer.last() == Some(&b'\r') {
                self.buffer.pop();
            }
        } else if read as u64 == LONGEST_LINE {
            let message = format!(
                "expected text, found a line of more than {} MiB",
                LONGEST_LINE >> 20
            );
            return Err(DumpError::syntax(self.name, self.number, 1, message));
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(text) if !text.contains('\0') => Ok(Some(text)),
            Ok(text) => {
                let column = text.find('\0').unwrap_or(0) + 1;
                let message = "expected text, found a zero byte";
                Err(DumpError::syntax(self.name, self.number, column, message))
            }
            Err(error) => {
                let column = error.valid_up_to() + 1;
                let message = "expected text, found bytes that are not UTF-8";
                Err(DumpError::syntax(self.name, self.number, column, message))
            }
        }
    }
}
