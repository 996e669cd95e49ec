//! Where KV events come from: of whatever is written, only the port counts. Whoever may write a document or label a pod must
//! not be able to have other people's prompts sent elsewhere, nor read from there.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use super::Report;
use crate::state::endpoint::{EventPort, EventPorts};

/// The annotation that says what `kvEvents` says.
pub const EVENTS: &str = "pilotfish.dev/kv-events";
/// The annotation that says what `kvReplay` says.
pub const REPLAY: &str = "pilotfish.dev/kv-replay";

const ADVICE: &str = "write the port alone: the host is always the endpoint's own address";

/// What a document's own members say.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written<'a> {
    /// `kvEvents`.
    pub events: Option<&'a String>,
    /// `kvReplay`.
    pub replay: Option<&'a String>,
}

/// The ports of the engine at `address`; what is written in a document's own members wins over annotations.
pub(super) fn ports(
    written: Written<'_>,
    annotations: &BTreeMap<String, String>,
    address: SocketAddr,
    report: &mut Report<'_>,
) -> EventPorts {
    let mut read = |member, annotation, written: Option<&String>| {
        let (value, path): (_, &[&str]) = match (written, annotations.get(annotation)) {
            (Some(value), _) => (value, &["spec", member]),
            (None, Some(value)) => (value, &["metadata", "annotations", annotation]),
            (None, None) => return None,
        };
        let port = port(value, address.ip());
        // A port of ours is the operator's to give.
        let port = port.filter(|port| written.is_some() || matches!(port, EventPort::Dial(_)));
        if port.is_none() {
            let why = format!("`{value}` is not a port of this endpoint");
            report.error(path, why, Some(ADVICE.to_owned()));
        }
        port
    };
    let events = read("kvEvents", EVENTS, written.events);
    let replay = match read("kvReplay", REPLAY, written.replay) {
        Some(EventPort::Dial(port)) => Some(port),
        Some(EventPort::Listen(_)) => {
            let why = "replay sockets are dialled, never listened for";
            report.error(&["spec", "kvReplay"], why.to_owned(), Some(ADVICE.to_owned()));
            None
        }
        None => None,
    };
    EventPorts { events, replay }
}

/// `PORT`, `tcp://*:PORT`, `tcp://OWN-ADDRESS:PORT`, `listen:PORT`.
fn port(value: &str, own: IpAddr) -> Option<EventPort> {
    let number = |text: &str| text.parse().ok().filter(|port| *port != 0);
    if let Some(port) = value.strip_prefix("listen:") {
        return number(port).map(EventPort::Listen);
    }
    let Some(address) = value.strip_prefix("tcp://") else { return number(value).map(EventPort::Dial) };
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ours = host == "*" || host.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified() || ip == own);
    if ours { number(port).map(EventPort::Dial) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("5557", Some(EventPort::Dial(5557)))]
    #[case("tcp://*:5557", Some(EventPort::Dial(5557)))]
    #[case("tcp://0.0.0.0:5557", Some(EventPort::Dial(5557)))]
    #[case("tcp://[::]:5557", Some(EventPort::Dial(5557)))]
    #[case("tcp://10.0.0.7:5557", Some(EventPort::Dial(5557)))]
    #[case("listen:5590", Some(EventPort::Listen(5590)))]
    #[case("tcp://10.0.0.8:5557", None)]
    #[case("tcp://engine:5557", None)]
    #[case("ipc:///tmp/x", None)]
    #[case("0", None)]
    #[case("", None)]
    fn only_ports_of_the_endpoint_itself_are_taken(#[case] value: &str, #[case] expected: Option<EventPort>) {
        assert_eq!(port(value, "10.0.0.7".parse().unwrap()), expected);
    }

    #[test]
    fn other_hosts_are_refused_where_they_stand() {
        let text = "
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: e, annotations: {pilotfish.dev/kv-replay: 'listen:1'}}
spec: {address: '10.0.0.1:8000', kvEvents: 'tcp://10.9.9.9:5557'}
";
        let lowered = super::super::lower(&[("a.yaml", text.into())]);
        let shown: Vec<String> =
            lowered.problems.iter().map(|p| format!("{}: {}", p.line, p.message)).collect();
        assert_eq!(
            shown,
            [
                "4: `listen:1` is not a port of this endpoint",
                "5: `tcp://10.9.9.9:5557` is not a port of this endpoint"
            ]
        );
    }
}
