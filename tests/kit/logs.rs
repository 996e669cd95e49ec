//! What the pickers of this process warned of. Tests run side by side: look for words that are your own.

use std::io::{self, Write};
use std::sync::LazyLock;

use parking_lot::Mutex;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CAPTURED: LazyLock<()> = LazyLock::new(|| {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(|| Lines)
        .init();
});

struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LINES.lock().push(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Captures warnings from now on, in all tests.
pub fn capture() {
    LazyLock::force(&CAPTURED);
}

/// Captured lines that contain all these words.
pub fn lines_with(words: &[&str]) -> Vec<String> {
    let lines = LINES.lock();
    lines.iter().filter(|line| words.iter().all(|word| line.contains(word))).cloned().collect()
}
