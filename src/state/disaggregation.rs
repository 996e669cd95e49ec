//! Who prefills and who decodes in a pool: the role and the group of each of its endpoints, and how KV blocks travel.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::pool::Member;

/// Which halves of a request an engine takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineRole {
    /// Prompts only.
    Prefill,
    /// Outputs; and whole requests, where its connector lets it.
    Decode,
    /// Everything.
    Both,
}

impl EngineRole {
    /// Whether it computes prompts for others.
    pub fn prefills(self) -> bool {
        matches!(self, EngineRole::Prefill | EngineRole::Both)
    }

    /// Whether it generates outputs.
    pub fn decodes(self) -> bool {
        matches!(self, EngineRole::Decode | EngineRole::Both)
    }

    /// The name in debug output.
    pub fn name(self) -> &'static str {
        match self {
            EngineRole::Prefill => "prefill",
            EngineRole::Decode => "decode",
            EngineRole::Both => "both",
        }
    }
}

/// How KV blocks get from prefill to decode, and so what the two engines must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvConnector {
    /// Engines find them by themselves; the decode leg follows the prefill leg.
    Http,
    /// `LMCache`: as `http`.
    Lmcache,
    /// A store that both engines read and write: as `http`.
    SharedStorage,
    /// vLLM's `NixlConnector`: the prefill engine says where its blocks are.
    Nixl,
    /// vLLM's `MooncakeConnector`: both engines are told the name of the transfer.
    Mooncake,
    /// `SGLang`: both engines meet in a room of the prefill engine's bootstrap server.
    Sglang,
    /// llm-d's sidecar beside the decode engine runs the prefill leg.
    Sidecar,
}

impl KvConnector {
    /// Every connector.
    pub const ALL: [KvConnector; 7] = [
        KvConnector::Http,
        KvConnector::Lmcache,
        KvConnector::SharedStorage,
        KvConnector::Nixl,
        KvConnector::Mooncake,
        KvConnector::Sglang,
        KvConnector::Sidecar,
    ];

    /// The name in documents.
    pub fn name(self) -> &'static str {
        match self {
            KvConnector::Http => "http",
            KvConnector::Lmcache => "lmcache",
            KvConnector::SharedStorage => "shared-storage",
            KvConnector::Nixl => "nixl",
            KvConnector::Mooncake => "mooncake",
            KvConnector::Sglang => "sglang",
            KvConnector::Sidecar => "sidecar",
        }
    }

    /// The connector of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|connector| connector.name() == name)
    }

    /// Whether a decode engine takes a request that nobody has prefilled. `SGLang`'s refuses what names no room.
    pub fn decode_serves_alone(self) -> bool {
        self != KvConnector::Sglang
    }
}

/// How labels of endpoints tell roles and groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoleLabels {
    /// Kthena's `pdGroup`. What lacks the group's label or both roles takes no request.
    Group {
        /// The label whose value is the group.
        key: String,
        /// Labels of prefill engines.
        prefill: BTreeMap<String, String>,
        /// Labels of decode engines.
        decode: BTreeMap<String, String>,
    },
    /// llm-d's role label; all endpoints are one group, and what has no role decodes.
    Role,
}

/// llm-d's role label.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// What an endpoint is in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its role.
    pub role: EngineRole,
    /// Its group: KV blocks do not travel between groups.
    pub group: u32,
}

impl RoleLabels {
    /// Role and group name of what carries these labels; none if it takes no request. Labels that make it both make it both.
    pub fn read<'a>(&self, labels: &'a BTreeMap<String, String>) -> Option<(EngineRole, &'a str)> {
        match self {
            RoleLabels::Group { key, prefill, decode } => {
                let carries = |wanted: &BTreeMap<String, String>| {
                    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
                };
                let group = labels.get(key).filter(|group| !group.is_empty())?;
                let role = match (carries(prefill), carries(decode)) {
                    (true, true) => EngineRole::Both,
                    (true, false) => EngineRole::Prefill,
                    (false, true) => EngineRole::Decode,
                    (false, false) => return None,
                };
                Some((role, group))
            }
            RoleLabels::Role => {
                let role = match labels.get(ROLE_LABEL).map(String::as_str) {
                    None | Some("decode") => EngineRole::Decode,
                    Some("prefill" | "encode-prefill") => EngineRole::Prefill,
                    Some("both" | "prefill-decode" | "decode/prefill-decode" | "encode-prefill-decode") => {
                        EngineRole::Both
                    }
                    Some(_) => return None,
                };
                Some((role, ""))
            }
        }
    }
}

/// What must be known of an engine to transfer KV blocks from it, as far as its document says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferSpec {
    /// Port of its bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// Its place among data-parallel ranks.
    pub data_parallel: Option<DataParallel>,
}

/// A place among data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParallel {
    /// The rank that is meant; none if any of them.
    pub rank: Option<u16>,
    /// Whether its engine must be told, since ranks share a port.
    pub told: bool,
    /// How many there are, above 0.
    pub size: u16,
}

/// How a pool's document describes its disaggregation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisaggregationSpec {
    /// How roles are told.
    pub labels: RoleLabels,
    /// How KV blocks travel.
    pub connector: KvConnector,
}

/// The roles of a pool's endpoints in one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disaggregation {
    /// How KV blocks travel.
    pub connector: KvConnector,
    /// What each member is, in the order of the pool's members; none for those that take no request.
    pub placements: Vec<Option<Placement>>,
    /// Group names, by their numbers.
    pub groups: Vec<Arc<str>>,
}

impl Disaggregation {
    /// Reads the roles of `members`. None if they are told by llm-d's label and nobody only prefills: then it is a pool like
    /// any other.
    pub fn of(spec: &DisaggregationSpec, members: &[Arc<Member>]) -> Option<Self> {
        let mut groups: Vec<Arc<str>> = Vec::new();
        let placements: Vec<Option<Placement>> = members
            .iter()
            .map(|member| {
                let (role, name) = spec.labels.read(&member.endpoint.labels)?;
                let group = groups.iter().position(|group| **group == *name).unwrap_or_else(|| {
                    groups.push(name.into());
                    groups.len() - 1
                });
                Some(Placement { role, group: group as u32 })
            })
            .collect();
        let prefills =
            |placement: &Option<Placement>| placement.as_ref().is_some_and(|p| p.role == EngineRole::Prefill);
        let takes_none = placements.iter().any(Option::is_none);
        let applies = spec.labels != RoleLabels::Role || takes_none || placements.iter().any(prefills);
        applies.then_some(Self { connector: spec.connector, placements, groups })
    }

    /// Whether member `at` takes whole requests.
    pub fn serves(&self, at: usize) -> bool {
        let alone = self.connector.decode_serves_alone();
        self.role(at).is_some_and(|role| role == EngineRole::Both || (alone && role == EngineRole::Decode))
    }

    /// The role of member `at`.
    pub fn role(&self, at: usize) -> Option<EngineRole> {
        self.placements.get(at)?.as_ref().map(|placement| placement.role)
    }

    /// The group of member `at`.
    pub fn group(&self, at: usize) -> Option<u32> {
        self.placements.get(at)?.as_ref().map(|placement| placement.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[rstest]
    #[case(&[("g", "a"), ("role", "p")], Some((EngineRole::Prefill, "a")))]
    #[case(&[("g", "b"), ("role", "d")], Some((EngineRole::Decode, "b")))]
    #[case::without_a_group(&[("role", "d")], None)]
    #[case::with_an_empty_group(&[("g", ""), ("role", "d")], None)]
    #[case::without_a_role(&[("g", "a")], None)]
    fn groups_are_told_by_the_documents_labels(
        #[case] given: &[(&str, &str)],
        #[case] expected: Option<(EngineRole, &str)>,
    ) {
        let rule = RoleLabels::Group {
            key: "g".to_owned(),
            prefill: labels(&[("role", "p")]),
            decode: labels(&[("role", "d")]),
        };
        assert_eq!(rule.read(&labels(given)), expected);
    }

    #[rstest]
    #[case(None, Some(EngineRole::Decode))]
    #[case(Some("prefill"), Some(EngineRole::Prefill))]
    #[case(Some("prefill-decode"), Some(EngineRole::Both))]
    #[case(Some("encode"), None)]
    fn llm_ds_label_tells_roles(#[case] role: Option<&str>, #[case] expected: Option<EngineRole>) {
        let given: Vec<(&str, &str)> = role.into_iter().map(|role| (ROLE_LABEL, role)).collect();
        assert_eq!(RoleLabels::Role.read(&labels(&given)).map(|(role, _)| role), expected);
    }

    #[test]
    fn every_connector_is_found_by_its_name() {
        for connector in KvConnector::ALL {
            assert_eq!(KvConnector::named(connector.name()), Some(connector));
        }
        assert_eq!(KvConnector::named("Nixl"), None);
    }
}
