//! Integration tests: a picker in this process, spoken to through its ports.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails where it stands")]

/// What the tests stand on.
mod kit {
    /// The cases and their vocabulary.
    pub mod case;
    /// Simulated engines, and servers of metrics pages that no engine would write.
    pub mod engine;
    /// A real Envoy, and everything behind it.
    pub mod envoy;
    /// Waiting for something to become true.
    pub mod eventually;
    /// Envoy's side of an ext_proc stream.
    pub mod extproc;
    /// The kinds of gateways.
    pub mod gateways;
    /// A client of gRPC health.
    pub mod health;
    /// A request that waits for its response.
    pub mod held;
    /// Helm, and what the chart renders.
    pub mod helm;
    /// A client of Envoy.
    pub mod http;
    /// An issuer of JSON Web Tokens.
    pub mod jwt;
    /// A real API server.
    pub mod kube;
    /// An engine's KV events without an engine or sockets.
    pub mod kv_events;
    /// Captured warnings.
    pub mod logs;
    /// A pool whose engines have roles.
    pub mod pairs;
    /// A picker with its resources, flags, pages and metrics.
    pub mod picker;
    /// A picker in a process of its own.
    pub mod process;
    /// A rate-limit service that keeps what it was asked.
    pub mod rate_limits;
    /// A real redis-server.
    pub mod redis;
    /// What came back on an ext_proc stream.
    pub mod replies;
    /// Resources as YAML.
    pub mod resources;
    /// A server seen through a slow line.
    pub mod slow;
    /// Certificates, and clients that go by them.
    pub mod tls;
}

/// One test for every case of `tests/data/cases`.
mod cases {
    mod encodings;
    mod fairness;
    mod hashing;
    mod kubernetes;
    mod kv_events;
    mod lifecycle;
    pub mod load;
    mod metrics;
    mod observability;
    mod parsing;
    mod pd;
    mod performance;
    mod protocol;
    mod ratelimit;
    mod routing;
    mod scheduling;
}

/// What engines publish, over real sockets.
mod feeds {
    mod kv_events;
    mod limits;
    mod redis;
    mod zmtp;
}

/// What an ext_proc client of llm-d's kind sees.
mod extproc {
    mod limits;
    mod pools;
    mod queues;
    mod reports;
    mod rewrites;
    mod sessions;
    mod table;
}

/// How the ports serve: flags, TLS, health, and what gateways' conformance tests ask.
mod serving {
    mod conformance;
    mod flags;
    mod health;
    mod pairs;
    mod queues;
    mod tls;
}

/// Whole set-ups: clients, a real Envoy with the shipped configurations, the picker, simulated engines.
mod envoy {
    mod bodies;
    mod budgets;
    mod drain;
    mod failures;
    mod forgery;
    mod handover;
    mod identity;
    mod limits;
    mod outage;
    mod pairs;
    mod queues;
    mod reservations;
    mod retries;
    mod roles;
    mod rungs;
    mod sessions;
    mod settings;
    mod slow_prefill;
    mod streaming;
    mod tls;
}

/// A real API server: our definitions, what watches deliver, and what the chart installs.
mod kube {
    mod changes;
    mod chart;
    mod definitions;
    mod fields;
    mod guides;
    mod installed;
    mod outages;
    mod scale;
    /// Pods with engines behind them, an Envoy before them, and traffic.
    mod stand;
    mod status;
    mod watching;
    mod webhook;
}

/// Which module may import which.
mod imports;
