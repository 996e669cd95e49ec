//! A real Envoy with one of the shipped configurations, its example ports replaced.

use std::fmt::Write as _;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use pilotfish::document::Node;
use pilotfish::engine::EngineConfig;
use regex::Regex;
use serde_json::Value;
use tempfile::TempDir;

use super::engine::SimulatedEngine;
use super::eventually::eventually;
use super::http::Client;
use super::picker::{self, Picker};
use super::resources::{endpoint, pool};

/// A shipped configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// `static-fail-open.yaml`.
    StaticFailOpen,
    /// `full-duplex.yaml`.
    FullDuplex,
    /// `gateway-shaped.yaml`.
    GatewayShaped,
}

impl Setup {
    fn file(self) -> PathBuf {
        let name = match self {
            Setup::StaticFailOpen => "static-fail-open.yaml",
            Setup::FullDuplex => "full-duplex.yaml",
            Setup::GatewayShaped => "gateway-shaped.yaml",
        };
        Path::new("envoy").join(name)
    }

    /// Its configuration with these pieces, as `envoy/assemble.sh` writes it.
    pub fn assemble(self, pieces: &[&str]) -> String {
        let mut command = Command::new("envoy/assemble.sh");
        command.arg(self.file()).args(pieces.iter().map(|piece| Path::new("envoy").join(piece)));
        let done = command.stderr(Stdio::inherit()).output().unwrap();
        assert!(done.status.success(), "{self:?} with {pieces:?}");
        String::from_utf8(done.stdout).unwrap()
    }
}

/// A shipped configuration, read.
pub struct Settings {
    root: Value,
}

impl Settings {
    /// Of that set-up, without pieces.
    pub fn of(setup: Setup) -> Self {
        let documents = Node::parse(&setup.assemble(&[])).unwrap();
        Self { root: documents[0].to_json() }
    }

    /// The connection manager.
    pub fn connections(&self) -> &Value {
        &self.root["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    }

    /// The configuration of one of its HTTP filters.
    pub fn filter(&self, name: &str) -> &Value {
        let filters = self.connections()["http_filters"].as_array().unwrap();
        &filters.iter().find(|filter| filter["name"] == name).unwrap()["typed_config"]
    }

    /// Its only virtual host.
    pub fn virtual_host(&self) -> &Value {
        &self.connections()["route_config"]["virtual_hosts"][0]
    }

    /// All clusters.
    pub fn clusters(&self) -> &[Value] {
        self.root["static_resources"]["clusters"].as_array().unwrap()
    }
}

/// A running Envoy, killed when dropped.
#[derive(Debug)]
pub struct Gateway {
    /// Sends to its listener.
    pub client: Client,
    admin: Client,
    child: Child,
    dir: TempDir,
}

impl Gateway {
    /// Starts it over these pickers and engines, and waits until it serves and finds every picker healthy.
    pub async fn start(setup: Setup, pickers: &[SocketAddr], engines: &[SocketAddr]) -> Self {
        Self::adjusted(setup, pickers, engines, |text| text).await
    }

    /// The same with a configuration changed by `adjust`.
    pub async fn adjusted(
        setup: Setup,
        pickers: &[SocketAddr],
        engines: &[SocketAddr],
        adjust: impl FnOnce(String) -> String,
    ) -> Self {
        Self::assembled(setup, &[], pickers, engines, adjust).await
    }

    /// The same with pieces, named by their files, that operators put in by the same script.
    pub async fn assembled(
        setup: Setup,
        pieces: &[&str],
        pickers: &[SocketAddr],
        engines: &[SocketAddr],
        adjust: impl FnOnce(String) -> String,
    ) -> Self {
        let dir = TempDir::new().unwrap();
        let config = dir.path().join("envoy.yaml");
        let text = adjust(setup.assemble(pieces));
        std::fs::write(&config, adjusted(&text, pickers, engines)).unwrap();
        let admin_file = dir.path().join("admin");
        let log = File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new(binary());
        command.arg("-c").arg(&config).arg("--admin-address-path").arg(&admin_file);
        command.args(["--component-log-level", "upstream:error", "--log-level", "error"]);
        command.args(["--concurrency", "1", "--use-dynamic-base-id", "--drain-strategy", "immediate"]);
        let child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let nobody = Client::of(SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut gateway = Self { client: nobody.clone(), admin: nobody, child, dir };
        let admin = eventually("Envoy's admin port", async || {
            gateway.must_run();
            std::fs::read_to_string(&admin_file).ok()?.trim().parse().ok()
        });
        gateway.admin = Client::of(admin.await);
        let listener = eventually("Envoy's listener", async || gateway.listener().await).await;
        gateway.client = Client::of(listener);
        gateway.until_healthy("pilotfish", pickers.len()).await;
        if setup == Setup::StaticFailOpen {
            gateway.until_healthy("fallback", engines.len()).await;
        }
        gateway
    }

    fn must_run(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("Envoy ended with {status}: {}", self.log());
        }
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Address of its admin port.
    pub fn admin(&self) -> SocketAddr {
        self.admin.gateway()
    }

    async fn page(&self, path: &str) -> Option<String> {
        let answer = self.admin.open("GET", path, &[], super::http::whole("")).await.ok()?;
        let answer = answer.try_rest().await.ok()?;
        (answer.status == 200).then(|| String::from_utf8(answer.body.to_vec()).unwrap())
    }

    async fn listener(&self) -> Option<SocketAddr> {
        let listeners: Value = serde_json::from_str(&self.page("/listeners?format=json").await?).unwrap();
        let address = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
        let port = address["port_value"].as_u64().filter(|port| *port > 0)?;
        self.page("/ready").await?;
        Some(SocketAddr::new(address["address"].as_str()?.parse().ok()?, u16::try_from(port).ok()?))
    }

    /// A statistic of Envoy.
    pub async fn statistic(&self, name: &str) -> Option<u64> {
        let page = self.page(&format!("/stats?filter=^{}$", name.replace('.', "\\."))).await?;
        page.trim().rsplit_once(": ")?.1.parse().ok()
    }

    /// Waits until so many members of a cluster are healthy.
    pub async fn until_healthy(&self, cluster: &str, expected: usize) {
        let name = format!("cluster.{cluster}.membership_healthy");
        eventually(format!("{expected} healthy in {cluster}"), async || {
            (self.statistic(&name).await? == expected as u64).then_some(())
        })
        .await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The pinned Envoy: of `make test`, else installed by the script.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("PILOTFISH_ENVOY").filter(|path| !path.is_empty()) {
            return path.into();
        }
        let script = Path::new("scripts/envoy.sh");
        let found = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
        assert!(found.status.success(), "scripts/envoy.sh found no Envoy");
        String::from_utf8(found.stdout).unwrap().trim().into()
    })
}

/// The configuration with its own two ports free ones, and the example pickers and engines replaced by these. Lines of
/// examples are repeated, or left out, as there are more or fewer.
fn adjusted(text: &str, pickers: &[SocketAddr], engines: &[SocketAddr]) -> String {
    let port = Regex::new(r"port_value: (\d+)").unwrap();
    let address = Regex::new(r"address: \S+, port_value: \d+").unwrap();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let example = port.captures(line).map(|found| found[1].parse::<usize>().unwrap());
        let instead = match example {
            Some(9002) => pickers,
            Some(8001) => engines,
            Some(8002 | 8003) => continue,
            Some(9901 | 10000) => {
                let _ = writeln!(out, "{}", port.replace(line, "port_value: 0"));
                continue;
            }
            _ => {
                let _ = writeln!(out, "{line}");
                continue;
            }
        };
        for at in instead {
            let at = format!("address: {}, port_value: {}", at.ip(), at.port());
            let _ = writeln!(out, "{}", address.replace(line, at));
        }
    }
    out
}

/// Engines, a picker in this process, and an Envoy before them.
pub struct Stand {
    /// Sends to Envoy.
    pub client: Client,
    /// Envoy.
    pub gateway: Gateway,
    /// The picker.
    pub picker: Picker,
    /// The engines, in the order of their endpoints.
    pub engines: Vec<SimulatedEngine>,
}

impl Stand {
    /// Over so many engines in one InferencePool.
    pub async fn of(setup: Setup, engines: usize) -> Self {
        Self::with(setup, engines, &pool(), |picker| picker).await
    }

    /// Over so many engines, these resources beside their endpoints, and a picker adjusted by `adjust`.
    pub async fn with(
        setup: Setup,
        engines: usize,
        resources: &str,
        adjust: impl FnOnce(picker::Setup) -> picker::Setup,
    ) -> Self {
        Self::assembled((setup, &[], |text| text), engines, resources, adjust).await
    }

    /// The same with an Envoy of pieces, and an adjusted configuration.
    pub async fn assembled(
        (setup, pieces, change): (Setup, &[&str], impl FnOnce(String) -> String),
        engines: usize,
        resources: &str,
        adjust: impl FnOnce(picker::Setup) -> picker::Setup,
    ) -> Self {
        let engines = start_engines(engines).await;
        let picker = adjust(Picker::with(&(endpoints(&engines) + resources))).start().await;
        picker
            .until("every engine is up", "pilotfish_endpoints", &[("state", "up")], engines.len() as f64)
            .await;
        let addresses: Vec<SocketAddr> = engines.iter().map(|engine| engine.state.address()).collect();
        let grpc = [picker.app.bound.grpc];
        let gateway = Gateway::assembled(setup, pieces, &grpc, &addresses, change).await;
        Self { client: gateway.client.clone(), gateway, picker, engines }
    }

    /// The engine of that name.
    pub fn engine(&self, name: &str) -> &SimulatedEngine {
        self.engines.iter().find(|engine| engine.state.name() == name).unwrap()
    }
}

/// The configuration with `sk-alice` and `sk-bob` for the example keys of its clients.
pub fn with_keys(text: &str) -> String {
    let mut text = text.to_owned();
    for (example, key) in
        [("REPLACE-BY-THE-KEY-OF-ALICE", "sk-alice"), ("REPLACE-BY-THE-KEY-OF-BOB", "sk-bob")]
    {
        assert_eq!(text.matches(example).count(), 1, "the example of {key}");
        text = text.replace(example, key);
    }
    text
}

/// So many quick engines.
pub async fn start_engines(count: usize) -> Vec<SimulatedEngine> {
    let config = EngineConfig { speed: 100.0, blocks: 4096, recorded: 512, ..EngineConfig::default() };
    let mut engines = Vec::with_capacity(count);
    for _ in 0..count {
        engines.push(SimulatedEngine::start(config.clone()).await);
    }
    engines
}

/// The endpoints of engines.
pub fn endpoints(engines: &[SimulatedEngine]) -> String {
    let one = |engine: &SimulatedEngine| endpoint(engine.state.name(), &engine.address());
    engines.iter().map(one).collect::<Vec<_>>().concat()
}
