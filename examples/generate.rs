//! Writes the files that are derived from the plugins: `cargo run --example generate`.

use std::fs;
use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (path, text) in pilotfish::manual::documents() {
        let file = root.join(path);
        fs::create_dir_all(file.parent().unwrap_or(root))?;
        fs::write(&file, text)?;
        println!("wrote {path}");
    }
    Ok(())
}
