//! Reader of the compiler's final bundles.
//!
//! ```text
//!    0x10   : > { %s17_s20 = scalar_lea.hbm %s5_s0, %s16_s17  ;;  %v1_v0 = vld [vmem:[...]] } /* Start region 7 */
//! ```
//!
//! The listing is a complete program after register allocation, one bundle a line, with comments that may run
//! over several lines. The reader streams it: it holds the text of one bundle at a time and hands on only the
//! statements of the scalar unit, which decide branches, predicates, transfers and waits.

use std::io::BufRead;
use std::ops::ControlFlow;

use super::error::DumpError;
use super::lines::Lines;

/// Longest text of one bundle, in bytes.
const LONGEST_BUNDLE: usize = 8 << 20;

/// What the reader says of one bundle, statements first.
pub(super) trait Sink {
    /// A statement of the scalar unit: its text without comments, and its comments.
    fn statement(&mut self, text: &str, comment: &str);
    /// The bundle ends. `label` is the two letters in front of it, if any; `trailing` the comments after it;
    /// `text` all of it; `nothing` whether it holds no statement at all.
    fn bundle(&mut self, bundle: &Bundle<'_>);
}

/// A bundle.
#[derive(Debug)]
pub(super) struct Bundle<'a> {
    /// Role of the bundle in the control flow, such as `LB` for the body of a loop.
    pub(super) label: Option<&'a str>,
    /// Comments behind it, which name the regions that start and end here.
    pub(super) trailing: &'a str,
    /// The whole text, without its address.
    pub(super) text: &'a str,
    /// Depth of loops: the marks in front of it.
    pub(super) depth: usize,
    /// Number of statements, of any unit.
    pub(super) statements: usize,
}

/// Reads a listing to its end.
///
/// # Errors
/// The stream fails, is empty, is no such listing, or ends within a bundle.
pub(super) fn read(name: &str, stream: impl BufRead, sink: &mut impl Sink) -> Result<usize, DumpError> {
    let mut lines = Lines::new(name, stream);
    let mut scanner = Scanner::default();
    // Text of the bundle that is being gathered, and the line it starts at.
    let mut text = String::new();
    let mut label = String::new();
    let mut depth = 0;
    let mut start = 0;
    let mut count = 0_usize;
    let mut last = 0;
    while let Some(line) = lines.next()? {
        let header = header(line).filter(|header| header.address == count as u64);
        match header {
            Some(header) => {
                if count > 0 {
                    scanner.bundle(name, start, &text, (&label, depth), sink)?;
                }
                text.clear();
                label.clear();
                text.push_str(&line[header.body..]);
                label.push_str(header.label);
                depth = header.depth;
                count += 1;
                start = lines.number();
            }
            None if count > 0 => {
                if text.len() + line.len() > LONGEST_BUNDLE {
                    let message = format!(
                        "expected the end of bundle {:#x}, found more than 8 MiB",
                        count - 1
                    );
                    return Err(DumpError::syntax(name, start, 1, message));
                }
                text.push('\n');
                text.push_str(line);
            }
            None => {}
        }
        last = lines.number();
    }
    if count == 0 {
        let message = "expected a listing of bundles that starts with address 0, found none";
        return Err(DumpError::syntax(name, last.max(1), 1, message));
    }
    scanner.bundle(name, start, &text, (&label, depth), sink)?;
    Ok(count)
}

struct Header<'a> {
    address: u64,
    label: &'a str,
    depth: usize,
    /// Where the text behind the opening brace starts.
    body: usize,
}

/// `  0x1f LB: > > {`
fn header(line: &str) -> Option<Header<'_>> {
    let bytes = line.as_bytes();
    let mut at = bytes.iter().position(|&b| b != b' ')?;
    let digits = at;
    while bytes.get(at).is_some_and(u8::is_ascii_alphanumeric) {
        at += 1;
    }
    let number = &line[digits..at];
    let address = match number.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok()?,
        None if number == "0" => 0,
        None => return None,
    };
    let mut label = "";
    let mut depth = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'>' => {
                depth += 1;
                at += 1;
            }
            b' ' | b':' => at += 1,
            b'A'..=b'Z' if label.is_empty() && bytes.get(at + 2) == Some(&b':') => {
                label = line.get(at..at + 2)?;
                at += 2;
            }
            b'{' => {
                return Some(Header {
                    address,
                    label,
                    depth,
                    body: at + 1,
                });
            }
            _ => return None,
        }
    }
    None
}

/// Takes the text of bundles apart. Its buffers are kept from bundle to bundle.
#[derive(Debug, Default)]
struct Scanner {
    statement: String,
    comment: String,
}

impl Scanner {
    fn bundle(
        &mut self,
        name: &str,
        start: usize,
        text: &str,
        (label, depth): (&str, usize),
        sink: &mut impl Sink,
    ) -> Result<(), DumpError> {
        let mut rest = text;
        let mut statements = 0;
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_whitespace());
            let skip = !is_scalar(rest);
            self.statement.clear();
            self.comment.clear();
            let (used, end) = self.scan(rest, skip);
            let empty = rest[..used].trim().is_empty();
            statements += usize::from(!empty);
            if !skip && !empty {
                sink.statement(self.statement.trim(), &self.comment);
            }
            rest = &rest[used..];
            match end {
                ControlFlow::Continue(()) => rest = &rest[2..],
                ControlFlow::Break(true) => break,
                ControlFlow::Break(false) => {
                    let line = start + text.matches('\n').count();
                    let column = text.len() - text.rfind('\n').map_or(0, |at| at + 1) + 1;
                    let message =
                        "expected `}` at the end of the bundle, found the next bundle or the end of the file";
                    return Err(DumpError::syntax(name, line, column, message));
                }
            }
        }
        sink.bundle(&Bundle {
            label: (!label.is_empty()).then_some(label),
            trailing: &rest[1..],
            depth,
            text,
            statements,
        });
        Ok(())
    }

    /// Copies a statement up to `;;` (continue) or the closing brace (break with true); break with false at
    /// the end of the text. The number of bytes up to there comes first.
    fn scan(&mut self, text: &str, skip: bool) -> (usize, ControlFlow<bool>) {
        let bytes = text.as_bytes();
        let (mut at, mut braces, mut copied) = (0, 0_usize, 0);
        while at < bytes.len() {
            match bytes[at] {
                b'/' if bytes.get(at + 1) == Some(&b'*') => {
                    let length = comment_length(&text[at..]);
                    if !skip {
                        let inside = text[at + 2..at + length].trim_end_matches("*/");
                        self.statement.push_str(&text[copied..at]);
                        match inside.strip_suffix('=') {
                            Some(key) if key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => {
                                self.statement.push('@');
                                self.statement.push_str(inside);
                            }
                            _ => {
                                self.statement.push(' ');
                                self.comment.push_str(inside);
                            }
                        }
                        copied = at + length;
                    }
                    at += length;
                }
                b';' if bytes.get(at + 1) == Some(&b';') => {
                    if !skip {
                        self.statement.push_str(&text[copied..at]);
                    }
                    return (at, ControlFlow::Continue(()));
                }
                b'{' => {
                    braces += 1;
                    at += 1;
                }
                b'}' if braces == 0 => {
                    if !skip {
                        self.statement.push_str(&text[copied..at]);
                    }
                    return (at, ControlFlow::Break(true));
                }
                b'}' => {
                    braces -= 1;
                    at += 1;
                }
                _ => at += 1,
            }
        }
        (text.len(), ControlFlow::Break(false))
    }
}

/// Length of a comment with the comments inside it; to the end of the text where it is not closed.
fn comment_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (2, 1);
    while at + 1 < bytes.len() {
        match (bytes[at], bytes[at + 1]) {
            (b'*', b'/') => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            // Only operand numbers are commented within comments.
            (b'/', b'*') if text[at..].starts_with("/*index=") => {
                depth += 1;
                at += 2;
            }
            _ => at += 1,
        }
    }
    text.len()
}

/// Whether a statement may decide branches, predicates, transfers or waits.
fn is_scalar(statement: &str) -> bool {
    let bytes = statement.as_bytes();
    match bytes.get(..2) {
        Some([b'%', b's' | b'p']) => true,
        Some([b'%', b'0'..=b'9']) => {
            let Some(at) = statement.find(" = ") else {
                return false;
            };
            let operation = &statement[at + 3..];
            [
                "dma",
                "sst",
                "sbr",
                "sdivrem",
                "vdelay",
                "inlined_call",
                "vwait",
                "vsyncadd",
            ]
            .iter()
            .any(|word| operation.starts_with(word))
        }
        _ => false,
    }
}
