//! A picker in a process of its own, for what happens when it ends.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::eventually::eventually;
use super::http::{Answer, Client, whole};
use super::kube::Cluster;
use super::picker::Series;

/// A running picker, killed when dropped.
#[derive(Debug)]
pub struct Process {
    /// Address of ext_proc.
    pub grpc: SocketAddr,
    /// Address of gRPC health.
    pub health: SocketAddr,
    admin: Client,
    child: Child,
    dir: TempDir,
}

impl Process {
    /// Starts one with ports of its own choice; `flags` are further ones, separated by blanks.
    pub async fn start(resources: &str, flags: &str) -> Self {
        Self::start_at(0, resources, flags).await
    }

    /// Starts one whose ext_proc port is given.
    pub async fn start_at(port: u16, resources: &str, flags: &str) -> Self {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("all.yaml"), resources).unwrap();
        let from = ["--resources".into(), dir.path().as_os_str().to_owned()];
        Self::run(dir, port, from, flags).await
    }

    /// Starts one that reads a cluster: of `PILOTFISH_BIN`, if that is set.
    pub async fn of_cluster(cluster: &Cluster, flags: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("kubeconfig");
        std::fs::write(&file, serde_json::to_string(&cluster.kubeconfig).unwrap()).unwrap();
        Self::run(dir, 0, ["--kubeconfig".into(), file.into_os_string()], flags).await
    }

    async fn run(dir: TempDir, port: u16, from: [OsString; 2], flags: &str) -> Self {
        let log = File::create(dir.path().join("log")).unwrap();
        let built = || env!("CARGO_BIN_EXE_pilotfish").into();
        let mut command = Command::new(std::env::var_os("PILOTFISH_BIN").unwrap_or_else(built));
        command.arg("serve").args(from).args(["--grpc-port", &port.to_string()]);
        command.args(["--grpc-health-port", "0", "--metrics-port", "0"]).args(flags.split_whitespace());
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            out.read_line(&mut line).map(|_| line)
        });
        let line = line.await.unwrap().unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            panic!("no picker: {}", std::fs::read_to_string(dir.path().join("log")).unwrap())
        });
        let bound = |name: &str| said["listening"][name].as_str().unwrap().parse().unwrap();
        let admin = Client::of(bound("admin"));
        Self { grpc: bound("grpc"), health: bound("health"), admin, child, dir }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU seconds it has taken, and MiB that are resident.
    pub fn used(&self) -> (f64, f64) {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", self.id())).unwrap();
        let stat = read("stat");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        let status = read("status");
        let resident = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let kib: f64 = resident.split_whitespace().nth(1).unwrap().parse().unwrap();
        (ticks / 100.0, kib / 1024.0)
    }

    /// Replaces its resources.
    pub fn apply(&self, resources: &str) {
        let next = self.dir.path().join("next");
        std::fs::write(&next, resources).unwrap();
        std::fs::rename(next, self.dir.path().join("all.yaml")).unwrap();
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// A page of the admin port.
    pub async fn get(&self, path: &str) -> Answer {
        self.admin.open("GET", path, &[], whole("")).await.unwrap().rest().await
    }

    /// The sum over the series of `name` that carry these labels.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let page = self.get("/metrics").await;
        Series::read(std::str::from_utf8(&page.body).unwrap()).sum(name, labels)
    }

    /// Waits until a sum of series has a value.
    pub async fn until(&self, name: &str, labels: &[(&str, &str)], expected: f64) {
        eventually(format!("{name} {labels:?} is {expected}"), async || {
            (self.metric(name, labels).await.to_bits() == expected.to_bits()).then_some(())
        })
        .await;
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        let done = Command::new("sh").args(["-c", &format!("kill -TERM {}", self.child.id())]).status();
        assert!(done.unwrap().success());
    }

    /// Waits until it has ended by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        eventually("the picker's end", async || self.child.try_wait().unwrap()).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
