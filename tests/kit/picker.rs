//! A picker in this process: resources in a directory of its own, flags through the real command line, ports of its own.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use kube::config::Kubeconfig;
use pilotfish::app::App;
use pilotfish::args::{Args, Command};
use serde_json::Value;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use super::eventually::{eventually, within};
use super::kube::Cluster;

/// Connections to the gRPC port: one carries 200 streams at most.
const CONNECTIONS: usize = 32;

/// A picker to be started.
#[derive(Debug, Default)]
pub struct Setup {
    resources: String,
    kubeconfig: Option<Kubeconfig>,
    config: Option<String>,
    flags: Vec<String>,
}

/// A running picker.
#[derive(Debug)]
pub struct Picker {
    /// The process's parts.
    pub app: App,
    dir: TempDir,
    http: Client<HttpConnector, Full<Bytes>>,
    channels: Vec<Channel>,
    next: AtomicUsize,
}

impl Setup {
    /// Reads the cluster with these credentials.
    pub fn with_kubeconfig(mut self, kubeconfig: Kubeconfig) -> Self {
        self.kubeconfig = Some(kubeconfig);
        self
    }

    /// With a scheduler configuration file.
    pub fn config(mut self, yaml: &str) -> Self {
        self.config = Some(yaml.to_owned());
        self
    }

    /// Scheduling by these plugin types alone; parameters may follow a type.
    pub fn plugins(self, types: &[&str]) -> Self {
        let mut config =
            "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n".to_owned();
        let types = || types.iter().map(|written| written.split_once(' ').unwrap_or((written, "{}")));
        for (name, parameters) in types() {
            let _ = writeln!(config, "- {{type: {name}, parameters: {parameters}}}");
        }
        config += "schedulingProfiles:\n- name: default\n  plugins:\n";
        for (name, _) in types() {
            let _ = writeln!(config, "  - pluginRef: {name}");
        }
        self.config(&config)
    }

    /// Scheduling as by default, with prompts cut into blocks of 64 bytes, by which these tests count.
    pub fn small_blocks(self) -> Self {
        self.plugins(&["prefix-cache {blockSizeToHash: 64}", "outstanding-tokens", "least-request"])
    }

    /// With a flag and its value.
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.flags.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// With a flag that stands alone, or brings its value itself.
    pub fn switch(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Starts it.
    pub async fn start(self) -> Picker {
        let dir = TempDir::new().unwrap();
        let mut line: Vec<String> = ["pilotfish", "serve"].map(str::to_owned).into();
        if let Some(kubeconfig) = &self.kubeconfig {
            let file = dir.path().join("kubeconfig");
            std::fs::write(&file, serde_json::to_string(kubeconfig).unwrap()).unwrap();
            line.extend(["--kubeconfig".to_owned(), file.to_str().unwrap().to_owned()]);
            line.extend(["--listen", "127.0.0.1", "--admin-listen", "127.0.0.1"].map(str::to_owned));
        } else {
            let resources = dir.path().join("resources");
            std::fs::create_dir(&resources).unwrap();
            std::fs::write(resources.join("all.yaml"), &self.resources).unwrap();
            line.extend(["--resources".to_owned(), resources.to_str().unwrap().to_owned()]);
        }
        for port in ["--grpc-port", "--grpc-health-port", "--metrics-port"] {
            line.extend([port.to_owned(), "0".to_owned()]);
        }
        if let Some(config) = &self.config {
            let file = dir.path().join("config.yaml");
            std::fs::write(&file, config).unwrap();
            line.extend(["--config".to_owned(), file.to_str().unwrap().to_owned()]);
        }
        line.extend(self.flags);
        let parsed = Args::try_parse_from(&line).unwrap_or_else(|error| panic!("{error}"));
        let Command::Serve(args) = parsed.command else { panic!("not serve") };
        let app = App::start(*args, &[]).await.unwrap();
        let grpc = Endpoint::from_shared(format!("http://{}", app.bound.grpc)).unwrap();
        let channels = (0..CONNECTIONS).map(|_| grpc.connect_lazy()).collect();
        let http = Client::builder(TokioExecutor::new()).build_http();
        let picker = Picker { app, dir, http, channels, next: AtomicUsize::new(0) };
        picker.leave_others_alone();
        picker
    }
}

impl Picker {
    /// A picker over these resources, to be adjusted and started.
    pub fn with(resources: &str) -> Setup {
        Setup { resources: resources.to_owned(), ..Setup::default() }
    }

    /// A picker over the namespace of a cluster, to be adjusted and started.
    pub fn of_cluster(cluster: &Cluster) -> Setup {
        let setup = Setup { kubeconfig: Some(cluster.kubeconfig.clone()), ..Setup::default() };
        setup.flag("--namespaces", &cluster.namespace)
    }

    /// Waits until it says that it is ready.
    pub async fn until_ready(&self) {
        eventually("the picker is ready", async || (self.get("/readyz").await.0 == 200).then_some(())).await;
    }

    /// Addresses of all endpoints, sorted.
    pub async fn addresses(&self) -> Vec<String> {
        let page = self.json("/debug/endpoints").await;
        let endpoints = page["endpoints"].as_array().unwrap().iter();
        let mut addresses: Vec<String> =
            endpoints.map(|endpoint| endpoint["endpoint"].as_str().unwrap().to_owned()).collect();
        addresses.sort();
        addresses
    }

    /// A picker over these resources.
    pub async fn serve(resources: &str) -> Self {
        Self::with(resources).start().await
    }

    /// Addresses of the cases may be somebody's: endpoints are scraped only where all are on this machine. Elsewhere they
    /// count as up, whatever the first scrapes met.
    fn leave_others_alone(&self) {
        let admin = &self.app.admin;
        let snapshot = admin.shared.decider.store.load_full();
        if snapshot.endpoints.iter().any(|endpoint| !endpoint.address.ip().is_loopback()) {
            admin.scraper.stop();
            admin.events.stop();
            snapshot.endpoints.iter().for_each(|endpoint| endpoint.health.accepted());
        }
    }

    /// Replaces its configuration file.
    pub fn configure(&self, yaml: &str) {
        std::fs::write(self.dir.path().join("config.yaml"), yaml).unwrap();
    }

    /// Replaces the resources, and waits until they are what requests see.
    pub async fn apply(&self, resources: &str) {
        let store = &self.app.admin.shared.decider.store;
        let before = store.load_full();
        let next = self.dir.path().join("next.yaml");
        std::fs::write(&next, resources).unwrap();
        std::fs::rename(next, self.dir.path().join("resources/all.yaml")).unwrap();
        let replaced = async || (!Arc::ptr_eq(&before, &store.load_full())).then_some(());
        eventually("the changed resources are read", replaced).await;
        self.leave_others_alone();
    }

    /// A connection to the gRPC port.
    pub fn channel(&self) -> Channel {
        self.channels[self.next.fetch_add(1, Ordering::Relaxed) % CONNECTIONS].clone()
    }

    async fn ask(&self, method: &str, path: &str, body: String) -> (u16, String) {
        let uri = format!("http://{}{path}", self.app.bound.admin);
        let request = http::Request::builder().method(method).uri(uri).body(Full::from(body)).unwrap();
        within(format!("{method} {path}"), async {
            let response = self.http.request(request).await.unwrap();
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            (status, String::from_utf8(body.to_vec()).unwrap())
        })
        .await
    }

    /// A page of the admin port.
    pub async fn get(&self, path: &str) -> (u16, String) {
        self.ask("GET", path, String::new()).await
    }

    /// A JSON page of the admin port.
    pub async fn json(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// The decision that `/debug/explain` gives for a body.
    pub async fn explain(&self, path: &str, body: &str) -> Value {
        self.post("/debug/explain", &serde_json::json!({"path": path, "body": body})).await
    }

    /// The JSON that a POST of `question` gives.
    pub async fn post(&self, path: &str, question: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, question.to_string()).await;
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// The endpoint of that address in `/debug/endpoints`.
    pub async fn endpoint(&self, address: &str) -> Value {
        let endpoints = self.json("/debug/endpoints").await;
        let mut found = endpoints["endpoints"].as_array().unwrap().iter();
        found.find(|e| e["endpoint"] == address).unwrap_or_else(|| panic!("no endpoint {address}")).clone()
    }

    /// The newest decision of a request, once it is settled.
    pub async fn decision(&self, request_id: &str) -> Value {
        eventually(format!("the decision of {request_id}"), async || {
            let page = self.json(&format!("/debug/decisions?request_id={request_id}&limit=1")).await;
            page["decisions"].get(0).cloned()
        })
        .await
    }

    /// All series.
    pub async fn metrics(&self) -> Series {
        Series::read(&self.get("/metrics").await.1)
    }

    /// The sum over the series of `name` that carry these labels.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics().await.sum(name, labels)
    }

    /// Waits until a sum of series has a value.
    pub async fn until(&self, what: &str, name: &str, labels: &[(&str, &str)], expected: f64) {
        let mut last = f64::NAN;
        let deadline = tokio::time::Instant::now() + super::eventually::DEADLINE;
        while last.to_bits() != expected.to_bits() {
            assert!(tokio::time::Instant::now() < deadline, "{what}: {name} is {last}, not {expected}");
            last = self.metric(name, labels).await;
            tokio::task::yield_now().await;
        }
    }

    /// Waits until nothing is booked anywhere, in requests and in tokens.
    pub async fn until_idle(&self, what: &str) {
        self.until(what, "pilotfish_reserved_requests", &[], 0.0).await;
        self.until(what, "pilotfish_reserved_tokens", &[], 0.0).await;
    }
}

/// A page of metrics.
#[derive(Debug)]
pub struct Series(Vec<(String, BTreeMap<String, String>, f64)>);

impl Series {
    /// Reads a page; label values of these tests hold no quotes and no braces.
    pub fn read(page: &str) -> Self {
        let lines = page.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Self(
            lines
                .map(|line| {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                    let pairs = labels.trim_end_matches('}').split("\",").filter(|pair| !pair.is_empty());
                    let labels = pairs.map(|pair| {
                        let (name, value) = pair.split_once("=\"").unwrap();
                        (name.to_owned(), value.trim_end_matches('"').to_owned())
                    });
                    (name.to_owned(), labels.collect(), value.parse().unwrap())
                })
                .collect(),
        )
    }

    /// Series on the page.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The sum over the series of `name` that carry these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |found: &BTreeMap<String, String>| {
            labels.iter().all(|(label, value)| found.get(*label).is_some_and(|v| v == value))
        };
        // Starting at 0 rather than at -0 keeps the bits of an empty sum comparable.
        self.0.iter().filter(|(n, found, _)| n == name && carries(found)).fold(0.0, |sum, s| sum + s.2)
    }
}
