//! Chat templates: from a conversation to the text that a model reads, byte by byte as Python's jinja2 renders it with the
//! settings of Hugging Face's transformers, which engines use.
//!
//! Settings: blocks trimmed and stripped, loop controls, a `tojson` that is `json.dumps` with `ensure_ascii` off,
//! `raise_exception`, `strftime_now` (in UTC, as containers have it), Python's string methods, and `generation` blocks that
//! render what they hold.

mod format;
mod python;
mod strftime;

use std::sync::LazyLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use regex::Regex;

pub use format::ContentFormat;

/// Steps a template may take: a conversation of 1,000 messages needs about a million, an endless loop has no end.
const FUEL: u64 = 20_000_000;
/// The name of the only template of an environment; without an ending nothing is escaped.
const NAME: &str = "chat";

/// Why a template cannot be used or refuses a conversation. It may quote the conversation, so it is not shown to anybody
/// but the operator who wrote the template, and only when the template itself is wrong.
#[derive(Debug, thiserror::Error)]
#[error("the chat template is not valid: {0}")]
pub struct TemplateError(String);

/// A template ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether what it renders depends on the time.
    pub uses_clock: bool,
    /// Which form of message content it reads.
    pub content: ContentFormat,
    /// Whether it knows the role `developer`; else engines make a system message of one.
    pub knows_developer: bool,
    /// Whether it refuses a system message that is not the first.
    pub system_first: bool,
    /// Whether it mentions `content`, without which transformers continues no message.
    pub names_content: bool,
}

impl ChatTemplate {
    /// Compiles a template.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let invalid = |error: Error| TemplateError(error.to_string());
        environment.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(invalid)?,
        );
        environment.set_fuel(Some(FUEL));
        python::teach(&mut environment);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime::now);
        environment.add_template_owned(NAME, without_generation_blocks(source)).map_err(invalid)?;
        let mut template = Self {
            environment,
            uses_clock: source.contains("strftime_now"),
            content: format::detect(source),
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
            system_first: false,
            names_content: source.contains("content"),
        };
        template.system_first = template.render(&a_late_system_message()).is_err();
        Ok(template)
    }

    /// Renders with these variables.
    pub fn render(&self, variables: &Value) -> Result<String, Error> {
        self.environment.get_template(NAME)?.render(variables)
    }
}

/// The conversation by which vLLM finds out whether system messages must come first.
fn a_late_system_message() -> Value {
    let message = |role| Value::from_pairs([("role", role), ("content", "t")]);
    let messages: Value = ["system", "user", "system", "user"].into_iter().map(message).collect();
    Value::from_pairs([("messages", messages), ("add_generation_prompt", Value::from(false))])
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// `{% generation %}` marks what a model wrote, for training; rendering takes no notice of it.
fn without_generation_blocks(source: &str) -> String {
    #[expect(clippy::expect_used, reason = "a constant pattern")]
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}").expect("the pattern is valid")
    });
    TAG.replace_all(source, |tag: &regex::Captures<'_>| {
        let block = if &tag[2] == "generation" { "if true" } else { "endif" };
        format!("{{%{} {block} {}%}}", &tag[1], &tag[3])
    })
    .into_owned()
}

#[cfg(test)]
mod tests;
