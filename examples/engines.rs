//! Many simulated engines in one process: what `scripts/bench_scrape.py` has the picker poll.
//!
//! `engines COUNT [whole]` prints the addresses as one JSON line. Pages have the size of a real vLLM's; with `whole` they
//! answer whole whatever `?name[]=` asks for.

use std::future::pending;

use pilotfish::engine::{Engine, EngineConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: usize = arguments.next().ok_or("give the number of engines")?.parse()?;
    let whole_pages = arguments.next().as_deref() == Some("whole");
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let mut addresses = Vec::new();
        for _ in 0..count {
            let config =
                EngineConfig { page_padding: 60_000, recorded: 0, whole_pages, ..EngineConfig::default() };
            let engine = Engine::bind(config).await?;
            addresses.push(engine.address().to_string());
            tokio::spawn(engine.run(pending()));
        }
        println!("{}", serde_json::json!({"listening": addresses}));
        pending::<()>().await;
        Ok(())
    })
}
