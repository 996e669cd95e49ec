//! Resources as YAML: endpoints, pools, servers, routes.

use std::fmt::Write as _;

use serde_json::Value;

/// The label that pools of these tests select by.
pub const APP: &str = "m";

/// An Endpoint of namespace `default`.
pub fn endpoint(name: &str, address: &str) -> String {
    endpoint_of("default", APP, name, address)
}

/// An Endpoint of any namespace and label `app`.
pub fn endpoint_of(namespace: &str, app: &str, name: &str, address: &str) -> String {
    format!(
        "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n\
         metadata: {{name: {name}, namespace: {namespace}, labels: {{app: {app}}}}}\nspec: {{address: '{address}'}}\n"
    )
}

/// An InferencePool that selects label `app`.
pub fn pool_of(namespace: &str, name: &str, app: &str) -> String {
    format!(
        "---\napiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{selector: {{matchLabels: {{app: {app}}}}}}}\n"
    )
}

/// The InferencePool `default/pool`.
pub fn pool() -> String {
    pool_of("default", "pool", APP)
}

/// A ModelServer of namespace `default` that selects label `app`; `more` are further lines of its spec, two spaces in.
pub fn server(name: &str, app: &str, more: &str) -> String {
    format!(
        "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {{name: {name}}}\nspec:\n  \
         inferenceEngine: vLLM\n  workloadSelector: {{matchLabels: {{app: {app}}}}}\n  workloadPort: {{port: 8000}}\n{more}"
    )
}

/// A ModelRoute of namespace `default`; `spec` is indented by two spaces.
pub fn route(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\nmetadata: {{name: {name}}}\nspec:\n{spec}"
    )
}

/// `ip:port` of a case's pod, brackets where IPv6 needs them.
pub fn addresses(pod: &Value) -> Vec<String> {
    let ip: std::net::IpAddr = pod["ip"].as_str().unwrap().parse().unwrap();
    let ports = match &pod["ports"] {
        Value::Array(ports) => ports.clone(),
        _ => vec![pod["port"].clone()],
    };
    let port = |port: &Value| std::net::SocketAddr::new(ip, port.as_u64().unwrap() as u16).to_string();
    ports.iter().map(port).collect()
}

/// The pods of a case as Endpoints of namespace `default`.
pub fn endpoints(pods: &Value) -> String {
    let mut yaml = String::new();
    for pod in pods.as_array().unwrap() {
        let name = pod["name"].as_str().unwrap();
        for (rank, address) in addresses(pod).iter().enumerate() {
            let name = if rank == 0 { name.to_owned() } else { format!("{name}-{rank}") };
            let _ = write!(yaml, "{}", endpoint(&name, address));
        }
    }
    yaml
}

/// The pods of a case in one InferencePool.
pub fn pods(pods: &Value) -> String {
    endpoints(pods) + &pool()
}
