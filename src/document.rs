//! YAML documents that remember where every value stands, so that each problem can be shown with a caret under it.

pub mod node;
pub mod problem;

pub use node::{Node, Place, Yaml};
pub use problem::{About, Problem, Problems, Severity};

use serde::de::DeserializeOwned;

/// Why a document is not of a type: where, what is wrong, and what to do.
pub type Rejection = (Place, String, Option<String>);

/// Reads a document into a type. An unknown member, a wrong type or a bad value becomes one problem at its place.
pub fn typed<T: DeserializeOwned>(node: &Node) -> Result<T, Rejection> {
    read(node).map_err(|mistake| (mistake.place, mistake.message, mistake.advice))
}

/// Reads a document into a type as [`typed`] does, but takes members that the type does not know out of the document.
/// Gives the place and the name of each.
pub fn typed_without_unknown<T: DeserializeOwned>(
    node: &mut Node,
) -> Result<(T, Vec<(Place, String)>), Rejection> {
    let mut unknown = Vec::new();
    loop {
        let mistake = match read(node) {
            Ok(read) => return Ok((read, unknown)),
            Err(mistake) => mistake,
        };
        let removed = mistake.unknown.as_deref().filter(|name| node.remove(&mistake.path, name));
        let Some(name) = removed else { return Err((mistake.place, mistake.message, mistake.advice)) };
        unknown.push((mistake.place, name.to_owned()));
    }
}

/// Why a document does not fit its type.
#[derive(Debug)]
struct Mistake {
    /// Keys and indices down to the wrong value, or to the map with an unknown member.
    path: Vec<String>,
    place: Place,
    message: String,
    /// The unknown member.
    unknown: Option<String>,
    advice: Option<String>,
}

fn read<T: DeserializeOwned>(node: &Node) -> Result<T, Mistake> {
    let value = node.to_json();
    serde_path_to_error::deserialize(&value).map_err(|error| {
        let mut path: Vec<String> = error.path().iter().map(ToString::to_string).collect();
        let message = error.inner().to_string();
        let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        // Depending on where serde notices, the path of an unknown member leads to its map or to itself.
        if unknown.is_some_and(|name| node.at(&path).key_place(name).is_none()) {
            path.pop();
        }
        let holder = node.at(&path);
        let place = unknown.and_then(|name| holder.key_place(name)).unwrap_or(holder.place);
        let nearest = unknown.and_then(|name| nearest(name, expected_names(&message)));
        let advice = nearest.map(|name| format!("did you mean `{name}`?"));
        let unknown = unknown.map(str::to_owned);
        Mistake { path, place, message, unknown, advice }
    })
}

/// The names that serde says it expected: everything between backquotes after the first.
fn expected_names(message: &str) -> Vec<&str> {
    message.split('`').skip(3).step_by(2).collect()
}

/// The known name nearest to `given`, if one is near enough to have been meant.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Nobody mistypes a name longer than any can be, and the distance takes the product of both lengths.
    if given.len() > LONGEST_NAME {
        return None;
    }
    known
        .into_iter()
        .map(|name| (distance(&given.to_ascii_lowercase(), &name.to_ascii_lowercase()), name))
        .filter(|(distance, name)| *distance <= 1 + name.len().max(given.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Longest name of an object in a cluster.
const LONGEST_NAME: usize = 253;

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
    fn unknown_members_are_taken_out_and_wrong_ones_stay_wrong() {
        let text = "modelName: x\nlater: {a: 1}\nrules:\n- {weight: 1, more: [2]}\n- {weight: 2}\n";
        let mut node = Node::parse(text).unwrap().remove(0);
        let (spec, unknown) = typed_without_unknown::<Spec>(&mut node).unwrap();
        assert_eq!((spec.model_name.as_str(), spec.rules.len()), ("x", 2));
        let names: Vec<_> = unknown.iter().map(|(place, name)| (place.line, name.as_str())).collect();
        assert_eq!(names, [(2, "later"), (4, "more")]);
        let mut node = Node::parse("later: 1\nrules: [{weight: heavy}]\n").unwrap().remove(0);
        assert_eq!(typed_without_unknown::<Spec>(&mut node).unwrap_err().0, Place { line: 2, column: 18 });
    }

    #[test]
    fn far_names_are_not_suggested() {
        assert_eq!(nearest("queue-score", ["queue-scorer", "random"]), Some("queue-scorer"));
        assert_eq!(nearest("zzz", ["queue-scorer", "random"]), None);
    }
}
