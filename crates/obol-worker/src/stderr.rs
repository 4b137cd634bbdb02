use std::collections::VecDeque;

use obol_model::Secret;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Lines that are kept for the report of a crash.
const TAIL: usize = 20;
/// The longest part of a line that is kept or logged.
const MAX_LINE: usize = 2048;

/// The last that a child said on stderr.
#[derive(Debug, Default)]
pub(crate) struct Tail(Mutex<VecDeque<String>>);

impl Tail {
    pub(crate) fn text(&self) -> String {
        self.0.lock().iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    fn push(&self, line: String) {
        let mut lines = self.0.lock();
        if lines.len() >= TAIL {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

/// Reads stderr to its end, whatever comes: a child whose stderr is full would stand still. The values of its
/// configured environment are blotted out.
pub(crate) async fn drain(
    mut stderr: impl AsyncRead + Unpin,
    name: &str,
    secrets: &[Secret<String>],
    tail: &Tail,
) {
    let mut chunk = vec![0; 8192];
    let mut line: Vec<u8> = Vec::new();
    loop {
        let read = match stderr.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(read) => read,
        };
        for byte in chunk.get(..read).unwrap_or_default() {
            match byte {
                b'\n' => finish(&mut line, name, secrets, tail),
                _ if line.len() < MAX_LINE => line.push(*byte),
                _ => {}
            }
        }
    }
    finish(&mut line, name, secrets, tail);
}

fn finish(line: &mut Vec<u8>, name: &str, secrets: &[Secret<String>], tail: &Tail) {
    let text = redact(String::from_utf8_lossy(line).trim_end().to_owned(), secrets);
    line.clear();
    if !text.is_empty() {
        tracing::debug!(worker = name, line = text, "worker stderr");
        tail.push(text);
    }
}

/// Short values are left: blotting out every `1` would help nobody.
pub(crate) fn redact(mut text: String, secrets: &[Secret<String>]) -> String {
    for secret in secrets.iter().map(Secret::expose).filter(|s| s.len() >= 6) {
        if text.contains(secret.as_str()) {
            text = text.replace(secret.as_str(), "[secret]");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tail_is_bounded_and_shows_no_secret() {
        let lines: Vec<_> = (0..100).map(|n| format!("\nline {n} with hunter2-token")).collect();
        let text = "x".repeat(100_000) + &lines.concat();
        let tail = Tail::default();
        drain(text.as_bytes(), "w", &[Secret::new("hunter2-token".to_owned())], &tail).await;
        let kept = tail.text();
        assert_eq!(kept.lines().count(), TAIL);
        assert_eq!(kept.lines().last(), Some("line 99 with [secret]"));
        assert!(!kept.contains("hunter2"));
    }
}
