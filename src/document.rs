//! YAML documents that remember where every value stands, so that each problem can be shown with a caret under it.

pub mod node;
pub mod problem;

pub use node::{Node, Place, Yaml};
pub use problem::{Problem, Problems, Severity};

use serde::de::DeserializeOwned;

/// Reads a document into a type. An unknown member, a wrong type or a bad value becomes one problem at its place.
pub fn typed<T: DeserializeOwned>(node: &Node) -> Result<T, (Place, String, Option<String>)> {
    let value = node.to_json();
    serde_path_to_error::deserialize(&value).map_err(|error| {
        let path: Vec<String> = error.path().iter().map(ToString::to_string).collect();
        let message = error.inner().to_string();
        let holder = node.at(&path);
        let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let place = unknown
            .and_then(|name| {
                holder
                    .key_place(name)
                    .or_else(|| node.at(&path[..path.len().saturating_sub(1)]).key_place(name))
            })
            .unwrap_or(holder.place);
        let nearest = unknown.and_then(|name| nearest(name, expected_names(&message)));
        let advice = nearest.map(|name| format!("did you mean `{name}`?"));
        (place, message, advice)
    })
}

/// The names that serde says it expected: everything between backquotes after the first.
fn expected_names(message: &str) -> Vec<&str> {
    message.split('`').skip(3).step_by(2).collect()
}

/// The known name nearest to `given`, if one is near enough to have been meant.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (distance(&given.to_ascii_lowercase(), &name.to_ascii_lowercase()), name))
        .filter(|(distance, name)| *distance <= 1 + name.len().max(given.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Levenshtein's distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "camelCase")]
    #[allow(dead_code, reason = "read by serde only")]
    struct Spec {
        #[serde(default)]
        model_name: String,
        #[serde(default)]
        rules: Vec<Rule>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read by serde only")]
    struct Rule {
        weight: u32,
    }

    #[rstest]
    #[case("modelNme: x\n", (1, 1), Some("did you mean `modelName`?"))]
    #[case("modelName: x\nrules:\n- weight: 1\n- weight: heavy\n", (4, 11), None)]
    #[case("rules:\n- weight: 1\n  wieght: 2\n", (3, 3), Some("did you mean `weight`?"))]
    #[case("rules:\n- {}\n", (2, 3), None)]
    fn a_wrong_value_is_found_at_its_place(
        #[case] yaml: &str,
        #[case] place: (u32, u32),
        #[case] advice: Option<&str>,
    ) {
        let node = Node::parse(yaml).unwrap().remove(0);
        let (found, message, found_advice) = typed::<Spec>(&node).unwrap_err();
        assert_eq!((found.line, found.column), place, "{message}");
        assert_eq!(found_advice.as_deref(), advice, "{message}");
    }

    #[test]
    fn far_names_are_not_suggested() {
        assert_eq!(nearest("queue-score", ["queue-scorer", "random"]), Some("queue-scorer"));
        assert_eq!(nearest("zzz", ["queue-scorer", "random"]), None);
    }
}
