//! Against what Python's jinja2 rendered (`tests/data/templates/generate.py`).

use super::ChatTemplate;
use crate::prompt::json::Json;
use minijinja::Value;
use serde::Deserialize;
use std::collections::BTreeMap;

const GOLDEN: &str = include_str!("../../../tests/data/templates/golden.json");

#[derive(Deserialize)]
struct Golden {
    templates: BTreeMap<String, String>,
    contexts: BTreeMap<String, Json>,
    rendered: Vec<Rendered>,
}

#[derive(Deserialize)]
struct Rendered {
    template: String,
    context: String,
    /// `None` where jinja2 raised.
    text: Option<String>,
}

#[test]
fn templates_render_byte_for_byte_as_in_python() {
    let golden: Golden = serde_json::from_str(GOLDEN).unwrap();
    let mut templates = BTreeMap::new();
    for (name, source) in &golden.templates {
        templates.insert(name, ChatTemplate::new(source).unwrap_or_else(|error| panic!("{name}: {error}")));
    }
    assert!(golden.rendered.len() > 100, "the golden file is nearly empty");
    let mut wrong = Vec::new();
    for case in &golden.rendered {
        let variables = Value::from(&golden.contexts[&case.context]);
        let text = templates[&case.template].render(&variables);
        if text.as_ref().ok() != case.text.as_ref() {
            wrong.push(format!("{} with {}:\n {text:?}\n {:?}", case.template, case.context, case.text));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), golden.rendered.len(), wrong.join("\n"));
}

#[test]
fn generation_blocks_and_the_clock_are_noticed() {
    let template = ChatTemplate::new("a\n{%- generation -%}\n b \n{%- endgeneration %}c").unwrap();
    assert_eq!(template.render(&Value::UNDEFINED).unwrap(), "abc");
    assert!(!template.uses_clock);
    let dated = ChatTemplate::new("{{ strftime_now('%Y') }}").unwrap();
    assert!(dated.uses_clock);
    assert_eq!(dated.render(&Value::UNDEFINED).unwrap().len(), 4);
}

#[test]
fn a_template_that_wants_the_system_message_first_is_known() {
    let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}{% endfor %}";
    assert!(ChatTemplate::new(strict).unwrap().system_first);
    assert!(!ChatTemplate::new("{% for m in messages %}{{ m.role }}{% endfor %}").unwrap().system_first);
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let endless =
        ChatTemplate::new("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}");
    // Compiling renders once, to see how it takes system messages.
    assert!(endless.unwrap().system_first);
}

#[test]
fn a_broken_template_is_an_error() {
    assert!(ChatTemplate::new("{% for %}").is_err());
}
