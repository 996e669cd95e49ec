//! A configuration inside a `ConfigMap`, as Kthena and llm-d are given theirs.

use super::{Plan, Reader, did_you_mean};
use crate::document::{Node, Yaml};

/// The kind.
pub const KIND: &str = "ConfigMap";
/// The key under which Kthena's router reads its configuration.
const KTHENA: &str = "routerConfiguration";

/// Reads the only text under `data`, or Kthena's.
pub fn lower(reader: &mut Reader<'_>, node: &Node) -> Option<Plan> {
    let data = node.get("data").unwrap_or(node);
    let keys: Vec<&str> = match &data.value {
        Yaml::Map(members) if node.get("data").is_some() => {
            members.iter().map(|(key, ..)| key.as_str()).collect()
        }
        _ => Vec::new(),
    };
    let key = match keys[..] {
        [only] => only,
        _ if keys.contains(&KTHENA) => KTHENA,
        _ => {
            let advice = did_you_mean(KTHENA, keys)
                .unwrap_or_else(|| format!("write the configuration under `data.{KTHENA}`"));
            let message = "a ConfigMap is read that holds one text, or Kthena's among others";
            reader.problems.error(data.place, message, Some(advice));
            return None;
        }
    };
    let key_place = data.key_place(key)?;
    let Some(text) = alone(&reader.problems.text(), key_place.line, key_place.column) else {
        let advice = format!("write it as a block: `{key}: |`, or into a file of its own");
        reader.problems.error(key_place, "the text under this key cannot be read in place", Some(advice));
        return None;
    };
    match Node::parse(&text) {
        Ok(documents) => {
            let inner = reader.only(&documents)?;
            reader.document(inner)
        }
        Err(error) => {
            reader.problems.error(error.place, error.message, None);
            None
        }
    }
}

/// The file with nothing left but the block below a key, which keeps its lines and columns: places found in it are places
/// in the file. `None` if a `|` does not begin a block there.
fn alone(text: &str, line: u32, column: u32) -> Option<String> {
    let line = line as usize;
    let mut lines = text.lines();
    let head = lines.nth(line - 1)?;
    let (_, value) = head.split_once(':')?;
    if !value.trim_start().starts_with('|') {
        return None;
    }
    let indent = |line: &str| line.len() - line.trim_start_matches(' ').len();
    let block = lines.take_while(|line| line.trim().is_empty() || indent(line) >= column as usize);
    let mut alone = "\n".repeat(line);
    for line in block {
        alone.push_str(line);
        alone.push('\n');
    }
    Some(alone)
}

#[cfg(test)]
mod tests {
    use crate::config::effective;
    use crate::config::tests::{shown, strict};
    use rstest::rstest;

    const HEAD: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n";

    #[rstest]
    #[case::kthena(
        "data:\n  other: x\n  routerConfiguration: |\n    scheduler:\n      plugins:\n\n        Score:\n          enabled: [{name: gpu-usage, weight: 1}]\n",
        "gpu-usage"
    )]
    #[case::llm_d(
        "data:\n  any-name.yaml: |-\n      # comment\n      apiVersion: llm-d.ai/v1alpha1\n      kind: EndpointPickerConfig\n      plugins:\n      - type: queue-scorer\nimmutable: true\n",
        "queue-scorer"
    )]
    fn the_text_of_a_config_map_is_read(#[case] data: &str, #[case] scorer: &str) {
        let read = strict(&format!("{HEAD}{data}"));
        assert_eq!(shown(&read), [""; 0]);
        assert_eq!(effective(&read.pipeline.unwrap())["scorers"][0]["name"], scorer);
    }

    #[rstest]
    #[case(
        "data:\n  routerConfiguration: |\n    scheduler:\n      plugin: {}\n",
        "7:7 error unknown member `plugin` of `scheduler` = did you mean `plugins`?"
    )]
    #[case("data:\n  routerConfiguration: |\n    scheduler: [\n", "error")]
    #[case("data:\n  routerConfiguration: ''\n", "5:3 error the text under this key cannot be read in place")]
    #[case("data: {a: x, b: z}\n", "4:7 error a ConfigMap is read that holds one text")]
    #[case("data: {}\n", "4:7 error a ConfigMap is read that holds one text")]
    #[case("", "1:1 error a ConfigMap is read that holds one text")]
    fn what_is_wrong_in_it_has_its_place_in_the_file(#[case] data: &str, #[case] expected: &str) {
        let read = strict(&format!("{HEAD}{data}"));
        let shown = shown(&read);
        assert!(read.pipeline.is_none() && shown.iter().any(|line| line.contains(expected)), "{shown:#?}");
    }
}
