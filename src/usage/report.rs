//! Numbers that an operator's expression makes of a response's usage, for whoever reads Envoy's dynamic metadata.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use cel::common::ast::{EntryExpr, Expr, IdedExpr};
use cel::{Context, Env, Program, Value};

use super::Usage;

/// Longest expression, bytes: with loops forbidden, evaluation is linear in it.
const LONGEST: usize = 4_096;

/// Usage with every field, on which expressions are tried when they are read.
const SAMPLE: Usage = Usage { prompt: 12, completion: 5, cached: Some(3) };

/// One number and where it goes.
pub struct Attribute {
    /// Metadata namespace.
    pub namespace: Arc<str>,
    /// Field of the namespace.
    pub name: Arc<str>,
    expression: Expression,
    condition: Option<Expression>,
    failures: AtomicU64,
}

/// A compiled expression with its text.
struct Expression {
    text: Box<str>,
    program: Program,
}

/// An expression that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// It is long enough to be slow.
    #[error("an expression has {LONGEST} bytes at most")]
    TooLong,
    /// It does not parse.
    #[error("`{0}` is not an expression: {1}")]
    Syntax(Box<str>, String),
    /// It has loops.
    #[error("`{0}` loops over a list: all, exists, map, filter and their kin are not available")]
    Loop(Box<str>),
    /// It fails, or gives something else.
    #[error("`{0}` {1}, tried on usage with all its numbers, which are doubles: write 2.0 for 2")]
    Fails(Box<str>, String),
}

impl Attribute {
    /// Compiles an attribute: `expression` gives a number, `condition` says whether there is one.
    pub fn compile(
        namespace: &str,
        name: &str,
        expression: &str,
        condition: Option<&str>,
    ) -> Result<Self, ExpressionError> {
        let attribute = Self {
            namespace: namespace.into(),
            name: name.into(),
            expression: Expression::compile(expression)?,
            condition: condition.map(Expression::compile).transpose()?,
            failures: AtomicU64::new(0),
        };
        let context = context(&SAMPLE);
        if let Some(condition) = &attribute.condition {
            condition.holds(&context).map_err(|why| ExpressionError::Fails(condition.text.clone(), why))?;
        }
        let text = || attribute.expression.text.clone();
        attribute.expression.number(&context).map_err(|why| ExpressionError::Fails(text(), why))?;
        Ok(attribute)
    }

    /// The whole number to report, if there is one. What fails is counted, and said once.
    pub fn value(&self, usage: &Usage) -> Option<i64> {
        let context = context(usage);
        let holds = self.condition.as_ref().map_or(Ok(true), |condition| condition.holds(&context));
        let found =
            holds.and_then(|holds| if holds { self.expression.number(&context).map(Some) } else { Ok(None) });
        found.unwrap_or_else(|why| {
            if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(
                    namespace = &*self.namespace,
                    name = &*self.name,
                    expression = &*self.expression.text,
                    why,
                    "the expression of a reported attribute fails on some usage: guard it with `condition`"
                );
            }
            None
        })
    }

    /// Responses on which it failed.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let condition = self.condition.as_ref().map(|condition| &condition.text);
        f.debug_struct("Attribute")
            .field("namespace", &self.namespace)
            .field("name", &self.name)
            .field("expression", &self.expression.text)
            .field("condition", &condition)
            .finish_non_exhaustive()
    }
}

impl Expression {
    fn compile(text: &str) -> Result<Self, ExpressionError> {
        if text.len() > LONGEST {
            return Err(ExpressionError::TooLong);
        }
        let text = text.trim();
        let program = Program::compile(text).map_err(|errors| {
            let why = errors.to_string();
            ExpressionError::Syntax(text.into(), why.lines().next().unwrap_or_default().to_owned())
        })?;
        if loops(program.expression()) {
            return Err(ExpressionError::Loop(text.into()));
        }
        Ok(Self { text: text.into(), program })
    }

    fn evaluate(&self, context: &Context<'_, '_>) -> Result<Value, String> {
        self.program.execute(context).map_err(|error| format!("fails ({error})"))
    }

    /// Doubles lose their fraction, as in llm-d.
    fn number(&self, context: &Context<'_, '_>) -> Result<i64, String> {
        match self.evaluate(context)? {
            Value::Int(number) => Ok(number),
            Value::UInt(number) => i64::try_from(number).map_err(|_| "gives too large a number".to_owned()),
            Value::Float(number) if number.is_finite() => Ok(number as i64),
            _ => Err("gives no number".to_owned()),
        }
    }

    fn holds(&self, context: &Context<'_, '_>) -> Result<bool, String> {
        match self.evaluate(context)? {
            Value::Bool(holds) => Ok(holds),
            _ => Err("is neither true nor false".to_owned()),
        }
    }
}

/// `usage` as engines write it.
fn context(usage: &Usage) -> Context<'static, 'static> {
    static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));
    let number = |tokens: u64| Value::Float(tokens as f64);
    let mut fields = HashMap::from([
        ("prompt_tokens", number(usage.prompt)),
        ("completion_tokens", number(usage.completion)),
        ("total_tokens", number(usage.prompt + usage.completion)),
    ]);
    if let Some(cached) = usage.cached {
        fields.insert("prompt_tokens_details", HashMap::from([("cached_tokens", number(cached))]).into());
    }
    let mut context = Context::with_env(Arc::clone(&ENVIRONMENT));
    context.add_variable_from_value("usage", fields);
    context
}

fn loops(expression: &IdedExpr) -> bool {
    let entry = |entry: &EntryExpr| match entry {
        EntryExpr::StructField(field) => loops(&field.value),
        EntryExpr::MapEntry(entry) => loops(&entry.key) || loops(&entry.value),
    };
    match &expression.expr {
        Expr::Comprehension(_) => true,
        Expr::Call(call) => call.target.as_deref().is_some_and(loops) || call.args.iter().any(loops),
        Expr::List(list) => list.elements.iter().any(loops),
        Expr::Map(map) => map.entries.iter().any(|one| entry(&one.expr)),
        Expr::Struct(structure) => structure.entries.iter().any(|one| entry(&one.expr)),
        Expr::Select(select) => loops(&select.operand),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const ALL: Usage = Usage { prompt: 100, completion: 10, cached: Some(64) };
    const FEW: Usage = Usage { prompt: 100, completion: 0, cached: None };

    #[rstest]
    #[case("usage.completion_tokens", None, ALL, Some(10))]
    #[case("usage.completion_tokens\n", Some("has(usage.completion_tokens)"), ALL, Some(10))]
    #[case("usage.prompt_tokens + usage.completion_tokens * 2.5", None, ALL, Some(125))]
    #[case("int(usage.prompt_tokens) * 2 + int(usage.total_tokens)", None, ALL, Some(310))]
    #[case("usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens", None, ALL, Some(36))]
    #[case(
        "has(usage.prompt_tokens_details) ? usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens : usage.prompt_tokens",
        None,
        FEW,
        Some(100)
    )]
    #[case("usage.prompt_tokens", Some("usage.completion_tokens > 0.0"), FEW, None)]
    #[case("usage.prompt_tokens / 3.0", None, ALL, Some(33))]
    fn a_number_is_made_of_usage(
        #[case] expression: &str,
        #[case] condition: Option<&str>,
        #[case] usage: Usage,
        #[case] expected: Option<i64>,
    ) {
        let attribute = Attribute::compile("envoy.lb", "cost", expression, condition).unwrap();
        assert_eq!(attribute.value(&usage), expected);
        assert_eq!(attribute.failures(), 0);
    }

    #[test]
    fn what_fails_is_counted_and_reports_nothing() {
        let text = "usage.prompt_tokens_details.cached_tokens";
        let attribute = Attribute::compile("envoy.lb", "cost", text, None).unwrap();
        assert_eq!(
            (attribute.value(&FEW), attribute.value(&ALL), attribute.value(&FEW)),
            (None, Some(64), None)
        );
        assert_eq!(attribute.failures(), 2);
        let infinite = Attribute::compile("n", "c", "100.0 / usage.completion_tokens", None).unwrap();
        assert_eq!((infinite.value(&ALL), infinite.value(&FEW)), (Some(10), None));
    }

    #[rstest]
    #[case("usage.", "is not an expression")]
    #[case("usage.prompt_tokens * 2", "write 2.0 for 2")]
    #[case("usage.prompt", "fails")]
    #[case("used.prompt_tokens", "fails")]
    #[case("'text'", "gives no number")]
    #[case("[1, 2].map(x, x)[0]", "loops over a list")]
    #[case("size([[1].filter(x, true)]) + 1", "loops over a list")]
    #[case(&"1.0 + ".repeat(1_000), "4096 bytes at most")]
    fn expressions_that_cannot_work_are_refused_when_they_are_read(
        #[case] text: &str,
        #[case] expected: &str,
    ) {
        let error = Attribute::compile("envoy.lb", "cost", text, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn a_condition_is_true_or_false() {
        let error = Attribute::compile("n", "c", "1", Some("usage.prompt_tokens")).unwrap_err().to_string();
        assert!(error.contains("`usage.prompt_tokens` is neither true nor false"), "{error}");
    }
}
