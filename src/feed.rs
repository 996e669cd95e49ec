//! Where knowledge comes from: each feed follows one source and writes what it learns into the state.

pub mod scrape;
