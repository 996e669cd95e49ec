//! Token limits of ModelRoutes.

use std::sync::Arc;

use super::{Located, Reader};
use crate::admission::limits::store::place_of;
use crate::admission::limits::{Both, Limit, Per, Rate, Together, Unit};
use crate::document::{Problem, Problems, nearest};
use crate::resources::ModelRouteSpec;
use crate::resources::model_route::RateLimit;
use crate::route::Route;

/// The annotation that says whose tokens are counted together.
const LIMIT_PER: &str = "pilotfish.dev/limit-per";
const PER: [(&str, Per); 2] = [("route", Per::Route), ("identity", Per::Identity)];

/// A store that a route names, with the warning it is unless the flags allow it.
pub(super) type NamedStore = (Arc<str>, Problem);

/// The limit of a route, and the store it names.
pub(super) fn limit(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    model: Option<&Arc<str>>,
) -> (Option<Limit>, Option<NamedStore>) {
    let per = per(problems, document);
    let Some(given) = &document.spec.rate_limit else { return (None, None) };
    let place = |path: &[&str]| document.place(&[&["spec", "rateLimit"], path].concat());
    let Some(unit) = unit(problems, document, given) else { return (None, None) };
    let rate = |tokens: Option<u32>| tokens.filter(|tokens| *tokens > 0).map(|tokens| Rate { tokens, unit });
    let rates = Both { input: rate(given.input_tokens_per_unit), output: rate(given.output_tokens_per_unit) };
    let fields = [
        ("inputTokensPerUnit", given.input_tokens_per_unit),
        ("outputTokensPerUnit", given.output_tokens_per_unit),
    ];
    for (field, _) in fields.iter().filter(|(_, tokens)| *tokens == Some(0)) {
        let advice = Some("give a number of 1 or more, or leave it out for no limit".to_owned());
        problems.error(
            place(&[field]),
            "a limit of 0 tokens, which would refuse everything, does not count",
            advice,
        );
    }
    if fields.iter().all(|(_, tokens)| tokens.is_none()) {
        let advice = Some("give `inputTokensPerUnit`, `outputTokensPerUnit` or both".to_owned());
        problems.warning(place(&[]), "a rateLimit without tokens limits nothing", advice);
    }
    let store = store(problems, document, given);
    if rates == Both::default() {
        return (None, None);
    }
    let name =
        model.cloned().or_else(|| document.spec.lora_adapters.first().map(|name| name.as_str().into()));
    let name: Arc<str> = name.unwrap_or_default();
    let together =
        store.as_ref().map(|(address, _)| Together { address: Arc::clone(address), name: Arc::clone(&name) });
    let route = document.name.to_string().into();
    (Some(Limit { route, model: name, rates, per, together }), store)
}

/// One second if none is given, as in Kthena.
fn unit(problems: &mut Problems, document: &Located<ModelRouteSpec>, given: &RateLimit) -> Option<Unit> {
    let Some(name) = &given.unit else { return Some(Unit::Second) };
    let found = Unit::ALL.into_iter().find(|unit| unit.name() == *name);
    if found.is_none() {
        let near = nearest(name, Unit::ALL.iter().map(|unit| unit.name()));
        let advice = near.map_or_else(
            || "write second, minute, hour, day or month".to_owned(),
            |name| format!("did you mean `{name}`?"),
        );
        let place = document.place(&["spec", "rateLimit", "unit"]);
        let why = format!("`{name}` is no unit of time: the route is not limited");
        problems.error(place, why, Some(advice));
    }
    found
}

fn per(problems: &mut Problems, document: &Located<ModelRouteSpec>) -> Per {
    let Some(value) = document.metadata.annotations.get(LIMIT_PER) else { return Per::default() };
    let place = document.place(&["metadata", "annotations", LIMIT_PER]);
    if let Some((_, per)) = PER.iter().find(|(name, _)| name == value) {
        if document.spec.rate_limit.is_none() {
            let why = format!("{LIMIT_PER} has no effect without `rateLimit`");
            problems.warning(place, why, None);
        }
        return *per;
    }
    let advice = Some("write `route` or `identity`".to_owned());
    problems.error(
        place,
        format!("`{value}` is nobody that tokens are counted for: the route's count together"),
        advice,
    );
    Per::default()
}

fn store(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    given: &RateLimit,
) -> Option<NamedStore> {
    let global = given.global.as_ref()?;
    let place = document.place(&["spec", "rateLimit", "global", "redis", "address"]);
    let address =
        global.redis.as_ref().map(|redis| redis.address.trim()).filter(|address| !address.is_empty());
    let Some(address) = address else {
        let advice = Some("give `global.redis.address`, or leave `global` out".to_owned());
        let place = document.place(&["spec", "rateLimit", "global"]);
        problems.error(place, "a global limit names no Redis: each replica counts for itself", advice);
        return None;
    };
    let why =
        format!("Redis at {address} is not allowed by the flags: each replica counts this limit for itself");
    problems.warning(place, why, Some("allow it with --redis-allow, or name an address that is".to_owned()));
    problems.found.pop().map(|problem| (address.into(), problem))
}

impl Reader {
    /// Of several routes whose limits would have the same name in a store, the one that is tried first keeps it; the others
    /// add their own, so that nobody spends the tokens of another route.
    pub(super) fn tell_limits_apart(routes: &mut [Route], limits: Vec<Option<Limit>>) {
        let order: Vec<_> = routes.iter().map(|route| (route.created, route.name.clone())).collect();
        // One store may be written in several ways.
        let key = |together: &Together| (place_of(&together.address), Arc::clone(&together.name));
        let keys: Vec<_> = limits.iter().map(|limit| limit.as_ref()?.together.as_ref().map(key)).collect();
        let taken = |at: usize| {
            keys[at].is_some()
                && keys.iter().enumerate().any(|(other, key)| order[other] < order[at] && *key == keys[at])
        };
        let clash: Vec<bool> = (0..keys.len()).map(taken).collect();
        for ((route, limit), clashes) in routes.iter_mut().zip(limits).zip(clash) {
            route.limit = limit.map(|mut limit| {
                if let Some(together) = limit.together.as_mut().filter(|_| clashes) {
                    together.name = format!("{}@{}", together.name, limit.route).into();
                }
                Arc::new(limit)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;

    use crate::admission::limits::{Both, Per, Rate, Unit};
    use crate::resources::lower::{Lowered, lower};

    fn route(name: &str, annotations: &str, limit: &str) -> String {
        format!(
            "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\n\
             metadata: {{name: {name}, annotations: {{{annotations}}}}}\n\
             spec: {{modelName: m, rules: [{{targetModels: [{{modelServerName: s}}]}}]{limit}}}\n"
        )
    }

    fn read(routes: &str) -> Lowered {
        let server = "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {name: s}\n\
                      spec: {inferenceEngine: vLLM, workloadSelector: {matchLabels: {app: x}}, workloadPort: {port: 1}}\n";
        lower(&[("a.yaml", Arc::from(format!("{server}{routes}")))])
    }

    #[rstest]
    #[case(
        "",
        ", rateLimit: {inputTokensPerUnit: 1, unit: hours}",
        "`hours` is no unit of time",
        Some("`hour`")
    )]
    #[case("", ", rateLimit: {unit: hour}", "a rateLimit without tokens", Some("inputTokensPerUnit"))]
    #[case("", ", rateLimit: {inputTokensPerUnit: 0}", "a limit of 0 tokens", Some("1 or more"))]
    #[case("", ", rateLimit: {inputTokensPerUnit: 1, global: {}}", "names no Redis", Some("address"))]
    #[case(
        "",
        ", rateLimit: {inputTokensPerUnit: 1, global: {redis: {address: ''}}}",
        "names no Redis",
        Some("address")
    )]
    #[case(
        "pilotfish.dev/limit-per: user",
        ", rateLimit: {inputTokensPerUnit: 1}",
        "`user` is nobody",
        Some("`identity`")
    )]
    #[case("pilotfish.dev/limit-per: identity", "", "no effect without `rateLimit`", None)]
    fn what_is_wrong_with_a_limit_is_told(
        #[case] annotations: &str,
        #[case] limit: &str,
        #[case] expected: &str,
        #[case] advice: Option<&str>,
    ) {
        let lowered = read(&route("r", annotations, limit));
        let found = lowered.problems.iter().find(|problem| problem.message.contains(expected));
        let found = found.unwrap_or_else(|| panic!("{:?}", lowered.problems));
        let said = found.advice.as_deref();
        assert!(advice.is_none_or(|words| said.is_some_and(|said| said.contains(words))), "{said:?}");
    }

    #[test]
    fn a_limit_is_read_with_its_unit_and_whose_it_is() {
        let limit = ", rateLimit: {inputTokensPerUnit: 5}";
        let lowered = read(&route("r", "pilotfish.dev/limit-per: identity", limit));
        let limit = lowered.world.routes[0].limit.clone().unwrap();
        let rate = Rate { tokens: 5, unit: Unit::Second };
        assert_eq!(limit.rates, Both { input: Some(rate), output: None });
        assert_eq!((&*limit.route, &*limit.model, limit.per), ("default/r", "m", Per::Identity));
        assert!(limit.together.is_none());
    }

    #[test]
    fn routes_of_one_model_have_buckets_of_their_own_in_a_store() {
        let limit = |at: &str| {
            format!(", rateLimit: {{inputTokensPerUnit: 5, global: {{redis: {{address: {at}}}}}}}")
        };
        let routes =
            [("b", "one:1"), ("a", "one:1"), ("c", "two:1"), ("d", "ONE:1"), ("e", "six"), ("f", "six:6379")];
        let text: String = routes.iter().map(|(name, at)| route(name, "", &limit(at))).collect();
        let mut lowered = read(&text);
        let name = |at: usize| {
            let limit = lowered.world.routes[at].limit.as_ref().unwrap();
            limit.together.as_ref().unwrap().name.to_string()
        };
        assert_eq!(
            [name(0), name(1), name(2), name(3), name(4), name(5)],
            ["m@default/b", "m", "m", "m@default/d", "m", "m@default/f"],
            "the one that is tried first has the short name"
        );
        let before = lowered.problems.len();
        lowered.judge_stores(|address| address != "two:1");
        let new: Vec<&str> =
            lowered.problems.iter().map(|p| p.message.as_str()).filter(|m| m.contains("Redis")).collect();
        assert_eq!((lowered.problems.len() - before, new.len()), (1, 1), "{new:?}");
        assert!(new[0].contains("two:1 is not allowed"), "{new:?}");
    }
}
