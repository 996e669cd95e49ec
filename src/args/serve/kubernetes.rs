//! What is read from a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::args::units;

/// The only group of InferencePools that is served.
const POOL_GROUP: &str = "inference.networking.k8s.io";
/// Ports one InferencePool may have, too.
const MOST_TARGET_PORTS: usize = 8;

/// Flags of the cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub struct KubernetesArgs {
    /// Serve this InferencePool alone; turns --secure-serving and --trust-hints on.
    #[arg(long, value_name = "NAME", value_parser = units::object, env = "PILOTFISH_POOL_NAME", conflicts_with_all = ["endpoint_selector", "endpoint_target_ports"])]
    pub pool_name: Option<String>,
    /// Its namespace, and that of the pods that --endpoint-selector selects; without it what NAMESPACE says in the
    /// environment, else `default`.
    #[arg(long, value_name = "NAMESPACE", value_parser = units::label, env = "PILOTFISH_POOL_NAMESPACE")]
    pub pool_namespace: Option<String>,
    /// The API group of the InferencePool; no other than the default is served.
    #[arg(long, value_name = "GROUP", default_value = POOL_GROUP, value_parser = pool_group, env = "PILOTFISH_POOL_GROUP")]
    pub pool_group: String,
    /// Serve the pods with these labels, without an InferencePool; turns --secure-serving on.
    #[arg(
        long,
        value_name = "LABEL=VALUE,...",
        requires = "endpoint_target_ports",
        env = "PILOTFISH_ENDPOINT_SELECTOR"
    )]
    pub endpoint_selector: Option<Selector>,
    /// The 1 to 8 ports on which those pods serve, each an endpoint of its own.
    #[arg(
        long,
        value_name = "PORT,...",
        requires = "endpoint_selector",
        env = "PILOTFISH_ENDPOINT_TARGET_PORTS"
    )]
    pub endpoint_target_ports: Option<TargetPorts>,
    /// How to reach the cluster; inside of one the pod's own service account, if not given.
    #[arg(long, value_name = "FILE", env = "PILOTFISH_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespaces that are watched; all if not given.
    #[arg(long, value_name = "NAMESPACE,...", value_delimiter = ',', value_parser = units::label, env = "PILOTFISH_NAMESPACES")]
    pub namespaces: Vec<String>,
}

impl KubernetesArgs {
    /// The namespace of the pool, or of the selected pods.
    pub fn pool_namespace(&self) -> String {
        self.namespace_or(std::env::var("NAMESPACE").ok())
    }

    fn namespace_or(&self, surroundings: Option<String>) -> String {
        let given = self.pool_namespace.clone().or(surroundings);
        given.filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned())
    }
}

fn pool_group(text: &str) -> Result<String, String> {
    if text == POOL_GROUP {
        Ok(text.to_owned())
    } else {
        Err(format!("only InferencePools of {POOL_GROUP} are served: leave the flag out"))
    }
}

/// Labels that a pod must have, all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(BTreeMap<String, String>);

impl Selector {
    /// Label -> value, at least one.
    pub fn labels(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut labels = BTreeMap::new();
        for pair in text.split(',').map(str::trim) {
            let (label, value) =
                pair.split_once('=').ok_or_else(|| format!("`{pair}` is not LABEL=VALUE"))?;
            let (label, value) = (units::label_key(label.trim())?, units::label_value(value.trim())?);
            if labels.insert(label.clone(), value).is_some() {
                return Err(format!("`{label}` stands there twice"));
            }
        }
        Ok(Self(labels))
    }
}

impl fmt::Display for Selector {
    /// As the API server reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (label, value)) in self.0.iter().enumerate() {
            write!(f, "{}{label}={value}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

/// 1 to 8 ports, all different.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPorts(Vec<u16>);

impl TargetPorts {
    /// In the order given, which is that of the ranks.
    pub fn ports(&self) -> &[u16] {
        &self.0
    }
}

impl FromStr for TargetPorts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut ports = Vec::new();
        for port in text.split(',').map(str::trim) {
            match port.parse::<u16>() {
                Ok(0) | Err(_) => return Err(format!("`{port}` is not a port: write 1 to 65535")),
                Ok(port) if ports.contains(&port) => return Err(format!("{port} stands there twice")),
                Ok(port) => ports.push(port),
            }
        }
        if ports.len() > MOST_TARGET_PORTS {
            return Err(format!("{} ports are too many: {MOST_TARGET_PORTS} at most", ports.len()));
        }
        Ok(Self(ports))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use rstest::rstest;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        kubernetes: KubernetesArgs,
    }

    fn read(flags: &str) -> Result<KubernetesArgs, String> {
        let line = std::iter::once("x").chain(flags.split_whitespace());
        Line::try_parse_from(line).map(|line| line.kubernetes).map_err(|error| error.to_string())
    }

    #[rstest]
    #[case("app=vllm", Some("app=vllm"))]
    #[case("b=2, a=1", Some("a=1,b=2"))]
    #[case("example.com/role=", Some("example.com/role="))]
    #[case("", None)]
    #[case("app", None)]
    #[case("app=a,app=b", None)]
    #[case("app in (a)", None)]
    #[case("app!=a", None)]
    #[case("app=a b", None)]
    #[case("-app=a", None)]
    fn selectors(#[case] text: &str, #[case] expected: Option<&str>) {
        assert_eq!(text.parse::<Selector>().ok().map(|s| s.to_string()).as_deref(), expected);
    }

    #[rstest]
    #[case("8000", Some(&[8000][..]))]
    #[case("8001,8000", Some(&[8001, 8000][..]))]
    #[case("1,2,3,4,5,6,7,8", Some(&[1, 2, 3, 4, 5, 6, 7, 8][..]))]
    #[case("1,2,3,4,5,6,7,8,9", None)]
    #[case("", None)]
    #[case("0", None)]
    #[case("8000,8000", None)]
    #[case("65536", None)]
    fn target_ports(#[case] text: &str, #[case] expected: Option<&[u16]>) {
        assert_eq!(text.parse::<TargetPorts>().ok().as_ref().map(TargetPorts::ports), expected);
    }

    #[rstest]
    #[case("--pool-name p", None)]
    #[case("--endpoint-selector a=b --endpoint-target-ports 80", None)]
    #[case("--endpoint-selector a=b", Some("--endpoint-target-ports"))]
    #[case("--endpoint-target-ports 80", Some("--endpoint-selector"))]
    #[case("--pool-name p --endpoint-selector a=b --endpoint-target-ports 80", Some("cannot be used with"))]
    #[case("--pool-group inference.networking.x-k8s.io", Some("inference.networking.k8s.io"))]
    #[case("--pool-group inference.networking.k8s.io", None)]
    #[case("--namespaces a,B", Some("B"))]
    #[case("--pool-name a/b", Some("a/b"))]
    fn what_fits_together(#[case] flags: &str, #[case] told: Option<&str>) {
        match (read(flags), told) {
            (Ok(_), None) => {}
            (Err(error), Some(told)) => assert!(error.contains(told), "{error}"),
            (found, _) => panic!("{flags}: {found:?}"),
        }
    }

    #[test]
    fn the_namespace_is_the_flags_then_the_surroundings_then_default() {
        let none = read("").unwrap();
        assert_eq!(none.namespace_or(None), "default");
        assert_eq!(none.namespace_or(Some(String::new())), "default");
        assert_eq!(none.namespace_or(Some("here".into())), "here");
        assert_eq!(read("--pool-namespace given").unwrap().namespace_or(Some("here".into())), "given");
        assert_eq!(read("--namespaces a,b").unwrap().namespaces, ["a", "b"]);
    }
}
