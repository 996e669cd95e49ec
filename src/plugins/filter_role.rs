//! Keeps prompts from engines that only decode, and outputs from engines that only prefill.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Filter, Instance, Kind, WhenEmpty, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::disaggregation::Disaggregation;
use crate::state::reservation::Role;

/// In a pool whose endpoints have roles, keeps those that may do what the request asks of them: the prompt, the output, or
/// both. Roles and groups are told by a ModelServer's `pdGroup`, else by the label `llm-d.ai/role`; an endpoint that has
/// none by the former is never used. Both halves of a request stay within one group. In other pools it does nothing. If it
/// would leave nobody the request is refused: 503 `no-endpoints`. Runs before every profile, listed or not.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "role",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::filter(ByRole))
    },
};

/// The filter.
#[derive(Debug)]
pub struct ByRole;

impl Filter for ByRole {
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        let Some(roles) = &cx.pool.disaggregation else { return };
        for (candidate, dropped) in candidates.iter().zip(dropped) {
            *dropped = objection(cx, roles, candidate.member);
        }
    }

    fn when_all_are_dropped(&self, _: &Cycle<'_>) -> WhenEmpty {
        WhenEmpty::RefuseNoEndpoints
    }
}

fn objection(cx: &Cycle<'_>, roles: &Disaggregation, member: u32) -> Option<&'static str> {
    let at = member as usize;
    let Some(placement) = roles.placements.get(at).copied().flatten() else {
        return Some("it has no role or no group");
    };
    match cx.role {
        Role::Serve if !roles.serves(at) => return Some("it does not serve whole requests"),
        Role::Prefill if !placement.role.prefills() => return Some("it does not prefill"),
        Role::Decode if !placement.role.decodes() => return Some("it does not decode"),
        _ => {}
    }
    if cx.peer == Some(member) {
        return Some("it does the other half");
    }
    let allowed = |groups: &[bool]| groups.get(placement.group as usize).copied().unwrap_or(false);
    (!cx.groups.is_none_or(allowed)).then_some("nobody of its group does the other half")
}
