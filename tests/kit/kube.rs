//! A real kube-apiserver over etcd: one pair for the whole run, a namespace a test.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, ValidationDirective,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config, discovery};
use pilotfish::document::Node;
use pilotfish::resources::{crd, lower};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use super::eventually::{DEADLINE, eventually};

/// Starts both servers, kills and restarts the API server when told to, and kills both when its input ends, which happens however the process at its other end dies.
/// The key of the certificate that the API server makes for itself signs service accounts too.
const SUPERVISOR: &str = r#"
binary=$1 dir=$2 etcd_port=$3 port=$4
"$binary" etcd --data-dir="$dir/etcd" --listen-client-urls="http://127.0.0.1:$etcd_port" \
  --advertise-client-urls="http://127.0.0.1:$etcd_port" --listen-peer-urls=http://127.0.0.1:0 \
  --unsafe-no-fsync --log-level=warn >"$dir/etcd.log" 2>&1 &
etcd=$!
start() {
  "$binary" kube-apiserver --etcd-servers="http://127.0.0.1:$etcd_port" --bind-address=127.0.0.1 --secure-port="$port" \
    --cert-dir="$dir/certs" --service-account-issuer=https://tests --service-account-key-file="$dir/certs/apiserver.key" \
    --service-account-signing-key-file="$dir/certs/apiserver.key" --token-auth-file="$dir/tokens.csv" \
    --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount --service-cluster-ip-range=10.0.0.0/24 \
    --advertise-address=127.0.0.1 --endpoint-reconciler-type=none --enable-priority-and-fairness=false \
    --profiling=false --v=1 >>"$dir/kube-apiserver.log" 2>&1 &
  api=$!
}
exec 2>/dev/null
start
while read -r command; do
  case $command in
    kill) kill -9 $api; wait $api; touch "$dir/killed" ;;
    start) rm -f "$dir/killed"; start ;;
  esac
done
kill -9 $etcd $api
wait
rm -rf "$dir"
"#;

/// A pair of servers, killed when dropped and when the process ends.
#[derive(Debug)]
pub struct Server {
    dir: PathBuf,
    port: u16,
    supervisor: Child,
}

impl Server {
    /// Starts a pair of its own, with the definitions of every kind that is read.
    pub async fn start() -> Self {
        let dir = TempDir::new().unwrap().keep();
        let port = free_port();
        std::fs::write(dir.join("tokens.csv"), "tests,admin,1,\"system:masters\"\npicker,picker,2\n")
            .unwrap();
        let mut command = Command::new("bash");
        command.args(["-c", SUPERVISOR, "supervisor"]).arg(binary()).arg(&dir);
        command.args([free_port().to_string(), port.to_string()]);
        // A group of its own: an interrupt from the keyboard ends the tests, and their end the servers.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let supervisor = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let server = Self { dir, port, supervisor };
        let ready = tokio::time::timeout(DEADLINE, server.ready()).await;
        let client = ready.unwrap_or_else(|_| panic!("the API server does not serve: {}", server.logs()));
        define(&client).await;
        server
    }

    /// Waits until the namespace `default` is there, which comes last.
    async fn ready(&self) -> Client {
        eventually("the API server is ready", async || {
            self.dir.join("certs/apiserver.crt").exists().then_some(())?;
            let client = self.try_client().await.ok()?;
            Api::<Namespace>::all(client.clone()).get("default").await.ok().map(|_| client)
        })
        .await
    }

    /// How a client reaches it, as administrator.
    pub fn kubeconfig(&self) -> Kubeconfig {
        let cluster = json!({
            "server": format!("https://127.0.0.1:{}", self.port),
            "certificate-authority": self.dir.join("certs/apiserver.crt"),
        });
        let config = json!({
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": "tests"}}],
        });
        serde_json::from_value(config).unwrap()
    }

    /// How somebody reaches it who may do nothing but what roles allow the user `picker`.
    pub fn kubeconfig_of_picker(&self) -> Kubeconfig {
        let mut config = self.kubeconfig();
        let user = config.auth_infos[0].auth_info.as_mut().unwrap();
        *user = serde_json::from_value(json!({"token": "picker"})).unwrap();
        config
    }

    /// Kills the API server, but not what it has stored.
    pub async fn kill_api_server(&mut self) {
        self.tell("kill\n");
        eventually("the API server's end", async || self.dir.join("killed").exists().then_some(())).await;
    }

    /// Starts it again, and waits until it serves.
    pub async fn restart_api_server(&mut self) {
        self.tell("start\n");
        self.ready().await;
    }

    fn tell(&mut self, command: &str) {
        self.supervisor.stdin.as_mut().unwrap().write_all(command.as_bytes()).unwrap();
    }

    /// A client for the runtime of the caller.
    pub async fn client(&self) -> Client {
        self.try_client().await.unwrap()
    }

    async fn try_client(&self) -> kube::Result<Client> {
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(self.kubeconfig(), &options).await;
        Client::try_from(config.map_err(kube::Error::InferKubeconfig)?)
    }

    /// Kills both servers at once and waits until they are gone.
    pub async fn kill(mut self) {
        self.supervisor.stdin.take();
        eventually("the servers' end", async || self.supervisor.try_wait().unwrap()).await;
    }

    fn logs(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        format!("{}\n{}", read("etcd.log"), read("kube-apiserver.log"))
    }
}

/// A namespace of a server, and a client of it.
#[derive(Clone)]
pub struct Cluster {
    /// As administrator.
    pub client: Client,
    /// The test's own.
    pub namespace: String,
    /// How others reach the server.
    pub kubeconfig: Kubeconfig,
    number: u32,
}

impl Cluster {
    /// A fresh namespace; the first starts the servers.
    pub async fn namespace() -> Self {
        static SERVER: OnceCell<Server> = OnceCell::const_new();
        Self::of(SERVER.get_or_init(Server::start).await).await
    }

    /// A fresh namespace of that server.
    pub async fn of(server: &Server) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let client = server.client().await;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("test-{number}");
        let mut fresh = Namespace::default();
        fresh.metadata.name = Some(namespace.clone());
        Api::all(client.clone()).create(&PostParams::default(), &fresh).await.unwrap();
        Self { client, namespace, kubeconfig: server.kubeconfig(), number }
    }

    /// An address of this machine that no other test has.
    pub fn address(&self, host: u8) -> String {
        let run = 10 + std::process::id() % 200;
        format!("127.{run}.{}.{host}", self.number)
    }

    /// Its pods.
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// An object as it stands.
    pub async fn get(&self, resource: &ApiResource, name: &str) -> DynamicObject {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, resource);
        api.get(name).await.unwrap()
    }

    /// Changes members of an object of a kind that is installed: `null` removes one.
    pub async fn patch(&self, resource: &ApiResource, name: &str, change: &Value) {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, resource);
        api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
    }

    /// Changes metadata of a pod.
    pub async fn describe(&self, pod: &str, metadata: &Value) {
        let patch = Patch::Merge(json!({"metadata": metadata}));
        self.pods().patch(pod, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Asks a pod to end, as a rollout does: it terminates, and stays until it has [ended](Self::end).
    pub async fn terminate(&self, pod: &str) {
        self.pods().delete(pod, &DeleteParams::default()).await.unwrap();
    }

    /// Removes a pod at once, as the kubelet does when it has ended.
    pub async fn end(&self, pod: &str) {
        self.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// Reports the status of a pod.
    pub async fn report_status(&self, pod: &str, status: &Value) -> Pod {
        // A strategic merge would keep the address before in `podIPs`.
        let patch = Patch::Merge(json!({"status": status}));
        self.pods().patch_status(pod, &PatchParams::default(), &patch).await.unwrap()
    }

    /// Applies documents to the namespace.
    pub async fn apply(&self, yaml: &str) -> Vec<DynamicObject> {
        let mut applied = Vec::new();
        for node in Node::parse(yaml).unwrap() {
            applied.push(self.try_apply(&node.to_json(), false).await.unwrap());
        }
        applied
    }

    /// Applies one object on the server's side, or only asks what would come of it. Unknown fields are errors. It goes to
    /// the namespace that it names, else to the test's own.
    pub async fn try_apply(&self, object: &Value, dry_run: bool) -> kube::Result<DynamicObject> {
        let (group, version) = object["apiVersion"]
            .as_str()
            .map_or(("", ""), |api_version| api_version.split_once('/').unwrap_or(("", api_version)));
        let kind = GroupVersionKind::gvk(group, version, object["kind"].as_str().unwrap());
        let (resource, capabilities) = discovery::pinned_kind(&self.client, &kind).await?;
        let api: Api<DynamicObject> = match capabilities.scope {
            discovery::Scope::Cluster => Api::all_with(self.client.clone(), &resource),
            discovery::Scope::Namespaced => {
                let namespace = object["metadata"]["namespace"].as_str().unwrap_or(&self.namespace);
                Api::namespaced_with(self.client.clone(), namespace, &resource)
            }
        };
        let mut params = PatchParams::apply("tests");
        params.dry_run = dry_run;
        params.field_validation = Some(ValidationDirective::Strict);
        api.patch(object["metadata"]["name"].as_str().unwrap(), &params, &Patch::Apply(object)).await
    }

    /// Creates a pod with these labels and reports it ready at an address of this machine, 127.0.0.x, as a kubelet would.
    pub async fn pod(&self, name: &str, labels: &Value, ip: &str) -> Pod {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": "node", "containers": [{"name": "engine", "image": "engine"}]},
        });
        self.try_apply(&pod, false).await.unwrap();
        self.report(name, ip, true).await
    }

    /// Reports address and readiness of a pod.
    pub async fn report(&self, name: &str, ip: &str, ready: bool) -> Pod {
        let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
        let addresses = json!([{"ip": ip}]);
        let status = json!({"phase": "Running", "podIP": ip, "podIPs": addresses, "conditions": [condition]});
        self.report_status(name, &status).await
    }
}

/// Defines all kinds as their owners ship them.
pub async fn define(client: &Client) {
    create(client, &definitions()).await;
}

/// All definitions.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut shipped: Vec<Value> = crd::definitions().into();
    for definition in inference_extension() {
        let [current, old] = lower::OBJECTIVE_GROUPS;
        // llm-d moved objectives and rewrites into a group of its own, with the fields that they had.
        shipped.extend((definition["spec"]["group"] == old).then(|| moved(&definition, current)));
        shipped.push(definition);
    }
    shipped.into_iter().map(|definition| serde_json::from_value(definition).unwrap()).collect()
}

/// The definitions that the Inference Extension ships of the kinds that are read: of `make test`, else fetched by the script.
pub fn inference_extension() -> [Value; 3] {
    let folder = installed("PILOTFISH_GIE_CRDS", "scripts/gie-crds.sh");
    ["k8s.io_inferencepools", "x-k8s.io_inferenceobjectives", "x-k8s.io_inferencemodelrewrites"].map(|name| {
        let file = folder.join(format!("inference.networking.{name}.yaml"));
        Node::parse(&std::fs::read_to_string(file).unwrap()).unwrap()[0].to_json()
    })
}

fn moved(definition: &Value, group: &str) -> Value {
    let mut moved = definition.clone();
    moved["spec"]["group"] = json!(group);
    let plural = definition["spec"]["names"]["plural"].as_str().unwrap();
    moved["metadata"]["name"] = json!(format!("{plural}.{group}"));
    moved
}

/// Creates definitions, and waits until they are served.
pub async fn create(client: &Client, definitions: &[CustomResourceDefinition]) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in definitions {
        api.create(&PostParams::default(), definition).await.unwrap();
    }
    // The first list of a kind takes a second, and so would each in turn.
    futures::future::join_all(definitions.iter().map(|definition| served(client, definition))).await;
}

/// Waits until objects of a definition can be listed.
async fn served(client: &Client, definition: &CustomResourceDefinition) {
    let spec = &definition.spec;
    let kind = GroupVersionKind::gvk(&spec.group, &spec.versions[0].name, &spec.names.kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, &spec.names.plural);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    eventually(format!("{kind:?} is served"), async || api.list(&ListParams::default()).await.ok()).await;
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The pinned servers.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| installed("PILOTFISH_KUBE", "scripts/kube.sh"))
}

/// What a script installs and prints the path of: `make test` has done so and says where.
fn installed(variable: &str, script: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        return path.into();
    }
    let done = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(done.status.success(), "{script} failed");
    String::from_utf8(done.stdout).unwrap().trim().into()
}
