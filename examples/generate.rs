//! Writes the files that are derived from plugins and resources: `cargo run --example generate`.

use std::path::PathBuf;
use std::{env, fs};

use pilotfish::resources::crd;

/// Helm reads nothing outside of a chart: what it takes from here lies there once more.
const CHART_FILES: &str = "charts/pilotfish/files";
const ENVOY: &str = "envoy/full-duplex.yaml";

fn main() -> anyhow::Result<()> {
    // Asked at run time: a build directory may serve several checkouts.
    let root = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    let definitions = crd::documents()?;
    let envoy = (ENVOY, fs::read_to_string(root.join(ENVOY))?);
    let of_chart = definitions.iter().chain([&envoy]);
    let of_chart: Vec<_> =
        of_chart.map(|(path, text)| (format!("{CHART_FILES}/{path}"), text.clone())).collect();
    let own = pilotfish::manual::documents().into_iter().chain(definitions);
    let own = own.map(|(path, text)| (path.to_owned(), text));
    for (path, text) in own.chain(of_chart) {
        let file = root.join(&path);
        fs::create_dir_all(file.parent().unwrap_or(&root))?;
        fs::write(&file, text)?;
        println!("wrote {path}");
    }
    Ok(())
}
