//! Session affinities in llm-d's spelling: what its producers read of a request becomes sources of session ids.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::listed::Listed;
use super::{Reader, did_you_mean};
use crate::document::{Node, typed};
use crate::plugins::{filter_session_affinity, score_session_affinity};
use crate::resources::duration;
use crate::schedule::plugin::{Instance, Kind};

/// The producer that reads one header or cookie in llm-d.
pub const SESSION_ID: &str = "session-id-producer";
/// The plugin that reads the session headers of coding agents in llm-d.
pub const AGENT_IDENTITY: &str = "agent-identity";

/// Headers in which Claude Code, OpenCode and Codex (now and once) send their sessions, in llm-d's order.
const AGENTS: [&str; 4] = ["x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"];
/// llm-d's name of the attribute that a `session-id-producer` publishes, before the producer's.
const ATTRIBUTE: &str = "SessionID/";
/// How a plugin names the producer whose sessions and table it takes over, in any letter case.
const PRODUCER_NAME: &str = "sessionIDProducerName";
const ID_CONFIG: &str = "sessionIdConfig";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct ProducerConfig {
    header_name: Option<String>,
    cookie_name: Option<String>,
    lru_size: Option<u32>,
    ttl: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct AgentConfig {
    additional_session_headers: Vec<String>,
}

/// What a producer means to an affinity.
#[derive(Debug, Default)]
struct Produced {
    sources: Vec<Value>,
    /// Bounds of the table: settings of [`ID_CONFIG`].
    table: Map<String, Value>,
}

impl Produced {
    fn header(name: &str) -> Self {
        Self { sources: vec![json!({"header": name})], table: Map::new() }
    }
}

/// Whether the type is a session affinity.
pub fn is_affinity(type_name: &str) -> bool {
    [filter_session_affinity::KIND.name, score_session_affinity::KIND.name].contains(&type_name)
}

/// Builds an affinity, with the producers that it names in place.
pub fn affinity(
    reader: &mut Reader<'_>,
    kind: &Kind,
    one: &Listed<'_>,
    all: &[Listed<'_>],
) -> Option<Instance> {
    let Some(node) = one.parameters.filter(|node| names_of(node).next().is_some()) else {
        return reader.build(kind, one.parameters);
    };
    let mut problems = 0;
    let mut resolve = |name: &Node| {
        let produced = produced(name.as_str().unwrap_or_default(), all);
        if produced.is_none() {
            let message = format!("no plugin instance publishes the session {}", name.to_json());
            let advice = did_you_mean(name.as_str().unwrap_or_default(), all.iter().map(|other| other.name));
            reader.problems.error(name.place, message, advice);
            problems += 1;
        }
        produced.unwrap_or_default()
    };
    let mut parameters = node.to_json().as_object().cloned().unwrap_or_default();
    let named = member(node, PRODUCER_NAME).map(|(key, name)| (key, resolve(name)));
    let mut table = Map::new();
    let mut sources: Vec<Value> = Vec::new();
    for source in sources_of(node) {
        match source.get("attribute") {
            Some(name) if only_attribute(source) => {
                let produced = resolve(name);
                sources.extend(produced.sources);
                table.extend(produced.table);
            }
            _ => sources.push(source.to_json()),
        }
    }
    if let Some((key, produced)) = named {
        parameters.remove(key);
        parameters.insert("strategy".to_owned(), json!("session_id"));
        sources.extend(produced.sources);
        table.extend(produced.table);
    }
    if problems > 0 {
        return None;
    }
    let key = member(node, ID_CONFIG).map_or(ID_CONFIG, |(key, _)| key);
    let own = parameters.get(key).and_then(Value::as_object).cloned().unwrap_or_default();
    table.extend(own);
    table.insert("sources".to_owned(), Value::Array(sources));
    parameters.insert(key.to_owned(), Value::Object(table));
    reader.built(kind, Value::Object(parameters), node.place)
}

/// Reads a producer's own entry; it is said where nothing uses it.
pub fn producer(reader: &mut Reader<'_>, one: &Listed<'_>, all: &[Listed<'_>]) {
    if let Some(node) = one.parameters.filter(|node| !node.is_blank()) {
        let read = if one.type_name == AGENT_IDENTITY {
            typed::<AgentConfig>(node).map(drop)
        } else {
            typed::<ProducerConfig>(node).and_then(|config| {
                let problem = config.problem().map(|why| (node.place, why.to_owned(), None));
                problem.map_or(Ok(()), Err)
            })
        };
        if let Err((place, message, advice)) = read {
            let message = format!("`{}`: {message}", one.type_name);
            return reader.problems.error(place, message, advice);
        }
    }
    let mut named =
        all.iter().filter(|other| is_affinity(other.type_name)).filter_map(|other| other.parameters);
    let used = named.any(|node| {
        names_of(node)
            .filter_map(Node::as_str)
            .any(|name| publisher(name, all).is_some_and(|p| p.name == one.name))
    });
    if !used {
        let message = format!("no session affinity uses `{}`", one.name);
        reader.problems.warning(one.place, message, None);
    }
}

impl ProducerConfig {
    fn problem(&self) -> Option<&'static str> {
        if self.header_name.is_some() == self.cookie_name.is_some() {
            return Some("give exactly one of `headerName` and `cookieName`");
        }
        if self.lru_size == Some(0) {
            return Some("`lruSize` must be 1 or more");
        }
        let ttl = self.ttl.as_ref().map(|ttl| duration::parse(ttl).unwrap_or_default());
        ttl.is_some_and(|ttl| ttl.is_zero()).then_some("`ttl` must be a duration above 0, such as 30m")
    }

    fn produced(self) -> Produced {
        let source = match (self.header_name, self.cookie_name) {
            (Some(name), _) => json!({"header": name}),
            (None, Some(name)) => json!({"cookie": name}),
            (None, None) => return Produced::header("x-session-id"),
        };
        let mut table = Map::new();
        if let Some(ttl) = self.ttl.as_deref().and_then(duration::parse) {
            table.insert("evictionTtlSeconds".to_owned(), json!(ttl.as_secs_f64()));
        }
        if let Some(size) = self.lru_size {
            table.insert("maxSessions".to_owned(), json!(size));
        }
        Produced { sources: vec![source], table }
    }
}

/// What stands behind the name of a producer, of its type, or of its attribute. llm-d makes a producer that is not listed.
fn produced(name: &str, all: &[Listed<'_>]) -> Option<Produced> {
    let Some(one) = publisher(name, all) else {
        return ["", "SessionID", SESSION_ID]
            .contains(&instance(name))
            .then(|| Produced::header("x-session-id"));
    };
    let node = one.parameters.filter(|node| !node.is_blank());
    // What is wrong with it is said at its own entry.
    if one.type_name == SESSION_ID {
        return Some(node.and_then(|node| typed::<ProducerConfig>(node).ok()).unwrap_or_default().produced());
    }
    let own = node.and_then(|node| typed::<AgentConfig>(node).ok()).unwrap_or_default();
    let headers = own.additional_session_headers.iter().map(String::as_str).chain(AGENTS);
    Some(Produced { sources: headers.map(|name| json!({"header": name})).collect(), table: Map::new() })
}

/// The listed producer of that name.
fn publisher<'a, 'n>(name: &str, all: &'a [Listed<'n>]) -> Option<&'a Listed<'n>> {
    let publishes = |one: &&Listed<'_>| [SESSION_ID, AGENT_IDENTITY].contains(&one.type_name);
    let name = instance(name);
    let by_name = all.iter().filter(publishes).find(|one| one.name == name);
    by_name.or_else(|| {
        let name = if ["", "SessionID"].contains(&name) { SESSION_ID } else { name };
        all.iter().filter(publishes).find(|one| one.type_name == name)
    })
}

fn instance(name: &str) -> &str {
    name.strip_prefix(ATTRIBUTE).unwrap_or(name)
}

/// Where an affinity names producers.
fn names_of(node: &Node) -> impl Iterator<Item = &Node> {
    let attributes = sources_of(node).iter().filter(|source| only_attribute(source));
    let named = member(node, PRODUCER_NAME).map(|(_, name)| name);
    attributes.filter_map(|source| source.get("attribute")).chain(named)
}

fn sources_of(node: &Node) -> &[Node] {
    let config = member(node, ID_CONFIG).map(|(_, config)| config);
    config.and_then(|config| config.get("sources")).map_or(&[], Node::items)
}

fn only_attribute(source: &Node) -> bool {
    source.get("attribute").is_some() && source.get("header").is_none() && source.get("cookie").is_none()
}

/// A parameter, whose name matches in any letter case, with the name as it is written.
fn member<'n>(node: &'n Node, name: &str) -> Option<(&'n str, &'n Node)> {
    let crate::document::Yaml::Map(members) = &node.value else { return None };
    members
        .iter()
        .find(|(key, ..)| key.eq_ignore_ascii_case(name))
        .map(|(key, _, value)| (key.as_str(), value))
}

#[cfg(test)]
mod tests {
    use crate::config::tests::{lenient, picker_config, shown, strict};
    use crate::session::{Binding, Carrier};
    use rstest::rstest;
    use std::time::Duration;

    fn bindings(text: &str) -> Vec<Binding> {
        let read = strict(&picker_config(text));
        assert!(read.problems.iter().all(|p| !p.message.contains("session")), "{:#?}", shown(&read));
        let pipeline = read.pipeline.unwrap_or_else(|| panic!("no pipeline"));
        pipeline.affinities.iter().map(|affinity| affinity.binding.clone()).collect()
    }

    fn headers(names: &[&str]) -> Vec<Carrier> {
        names.iter().map(|name| Carrier::Header((*name).into())).collect()
    }

    fn by_id(sources: Vec<Carrier>, secs: u64, capacity: usize) -> Binding {
        Binding::Id { sources, ttl: Duration::from_secs(secs), capacity }
    }

    #[test]
    fn a_filter_and_a_scorer_of_equal_parameters_share_their_bindings() {
        let both = "plugins:
- {type: session-affinity-filter, parameters: {strategy: session_id}}
- {type: session-affinity-scorer, parameters: {strategy: session_id, profileName: decode}}
- {type: session-affinity-scorer, name: soft}
";
        let expected = [
            by_id(headers(&["x-session-id"]), 300, 100_000),
            Binding::Token(Carrier::Header("x-session-token".into())),
        ];
        assert_eq!(bindings(both), expected);
    }

    #[rstest]
    #[case::agents(
        "- {type: agent-identity, parameters: {additionalSessionHeaders: [X-Mine]}}\n",
        "attribute: agent-identity",
        by_id(
            headers(&["x-session-id", "x-mine", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"]),
            300,
            100_000
        )
    )]
    #[case::a_header(
        "- {type: session-id-producer, name: mine, parameters: {headerName: X-Chat, ttl: 30m, lruSize: 7}}\n",
        "attribute: mine",
        by_id(headers(&["x-session-id", "x-chat"]), 1_800, 7)
    )]
    #[case::by_its_attribute(
        "- {type: session-id-producer, parameters: {headerName: x-chat}}\n",
        "attribute: SessionID/session-id-producer",
        by_id(headers(&["x-session-id", "x-chat"]), 300, 100_000)
    )]
    #[case::not_listed("", "attribute: session-id-producer", by_id(headers(&["x-session-id", "x-session-id"]), 300, 100_000))]
    fn attributes_become_what_their_producer_reads(
        #[case] producer: &str,
        #[case] source: &str,
        #[case] expected: Binding,
    ) {
        let text = format!(
            "plugins:
{producer}- type: session-affinity-filter
  parameters: {{strategy: session_id, sessionIdConfig: {{sources: [{{header: x-session-id}}, {{{source}}}]}}}}
"
        );
        assert_eq!(bindings(&text), [expected]);
    }

    #[test]
    fn an_affinity_that_names_a_producer_takes_over_its_cookie_and_table() {
        let text = "plugins:
- {type: session-id-producer, parameters: {cookieName: Chat, ttl: 1h, lruSize: 4096}}
- {type: session-affinity-scorer, parameters: {sessionIDProducerName: session-id-producer}}
";
        assert_eq!(bindings(text), [by_id(vec![Carrier::Cookie("Chat".into())], 3_600, 4_096)]);
    }

    #[test]
    fn llm_ds_files_with_a_session_affinity_are_read() {
        let well_known = picker_config(
            "plugins:
- type: passthrough-parser
- type: active-request-scorer
- type: session-affinity-scorer
requestHandler:
  parsers:
  - pluginRef: passthrough-parser
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
    weight: 1
  - pluginRef: session-affinity-scorer
    weight: 1
",
        );
        let read = lenient(&well_known);
        assert!(shown(&read).iter().all(|line| !line.contains("session")), "{:#?}", shown(&read));
        assert!(read.pipeline.unwrap().uses_tokens());
        let decode_only = picker_config(
            "plugins:
- {type: session-affinity-filter, name: session-affinity-decode}
- type: session-affinity-filter
  name: session-affinity-prefill
  parameters: {profileName: prefill, encodedEndpointHeaderConfig: {header: x-session-token-prefill}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: session-affinity-decode}]
- name: prefill
  plugins: [{pluginRef: session-affinity-prefill}]
",
        );
        let pipeline = strict(&decode_only).pipeline.unwrap();
        let [affinity] = &pipeline.affinities[..] else { panic!("{:?}", pipeline.affinities) };
        assert_eq!(affinity.token(), Some(&Carrier::Header("x-session-token".into())));
    }

    #[test]
    fn bindings_survive_a_reload_that_binds_alike_and_only_that() {
        let text = |ttl: u32| {
            picker_config(&format!(
                "plugins: [{{type: session-affinity-filter, parameters: {{strategy: session_id, sessionIdConfig: \
                 {{evictionTtlSeconds: {ttl}}}}}}}]\n"
            ))
        };
        let first = strict(&text(300)).pipeline.unwrap();
        let kept = |ttl| {
            let options = crate::config::Options::default();
            let file = std::path::Path::new("c");
            let again = crate::config::read(file, text(ttl).into(), &options, Some(&first)).pipeline.unwrap();
            std::sync::Arc::ptr_eq(&first.affinities[0], &again.affinities[0])
        };
        assert!(kept(300));
        assert!(!kept(60));
    }

    #[rstest]
    #[case(
        "plugins:\n- {type: session-affinity-filter, parameters: {strategy: session_id, sessionIdConfig: {sources: [{attribute: agent-identity}]}}}\n",
        "4:110 error no plugin instance publishes the session \"agent-identity\""
    )]
    #[case(
        "plugins:\n- {type: session-affinity-scorer, parameters: {sessionIDProducerName: mine}}\n- {type: session-id-producer, name: mind, parameters: {headerName: a}}\n",
        "4:71 error no plugin instance publishes the session \"mine\" = did you mean `mind`?"
    )]
    #[case(
        "plugins:\n- {type: session-id-producer, parameters: {headerName: a, cookieName: b}}\n",
        "4:43 error `session-id-producer`: give exactly one of `headerName` and `cookieName`"
    )]
    #[case(
        "plugins:\n- {type: session-id-producer, parameters: {headerNam: a}}\n",
        "4:44 error `session-id-producer`: unknown field `headerNam`"
    )]
    #[case(
        "plugins:\n- {type: session-id-producer, parameters: {headerName: a}}\n",
        "4:10 warning no session affinity uses `session-id-producer`"
    )]
    #[case(
        "plugins:\n- {type: session-affinity-filter, parameters: {strategi: session_id}}\n",
        "4:48 error `session-affinity-filter`: unknown field `strategi`"
    )]
    fn each_problem_of_sessions_has_its_place(#[case] text: &str, #[case] expected: &str) {
        let shown = shown(&strict(&picker_config(text)));
        assert!(shown.iter().any(|line| line.starts_with(expected)), "{shown:#?}");
    }
}
