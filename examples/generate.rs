//! Writes the files that are derived from plugins and resources: `cargo run --example generate`.

use std::path::PathBuf;
use std::{env, fs};

use pilotfish::resources::crd;

fn main() -> anyhow::Result<()> {
    // Asked at run time: a build directory may serve several checkouts.
    let root = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    for (path, text) in pilotfish::manual::documents().into_iter().chain(crd::documents()?) {
        let file = root.join(path);
        fs::create_dir_all(file.parent().unwrap_or(&root))?;
        fs::write(&file, text)?;
        println!("wrote {path}");
    }
    Ok(())
}
