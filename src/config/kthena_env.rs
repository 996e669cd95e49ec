//! Kthena's environment variables for fairness and session boost, as far as they make sense here.

use std::str::FromStr;
use std::time::Duration;

use super::queue::{HEAD_START, RATES, SESSION_HEADER};
use crate::admission::QueueSettings;
use crate::admission::gate::SESSIONS;
use crate::admission::settings::{Order, ShareBy};
use crate::resources::duration;

/// What the variables ask for and cannot have: both modes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ENABLE_FAIRNESS_SCHEDULING and ENABLE_SESSION_BOOST exclude each other: unset one")]
pub struct BothModes;

/// Changes the settings by what the variables say; each that says nothing usable is told with why.
///
/// # Errors
///
/// Both modes are asked for.
pub fn apply(
    to: &mut QueueSettings,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<String>, BothModes> {
    let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let mut read = Variables { variable: &variable, notes: Vec::new() };
    match (read.is_true("ENABLE_FAIRNESS_SCHEDULING"), read.is_true("ENABLE_SESSION_BOOST")) {
        (true, true) => return Err(BothModes),
        (true, false) => read.fairness(to),
        (false, true) => read.session_boost(to),
        (false, false) => {}
    }
    Ok(read.notes)
}

struct Variables<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    notes: Vec<String>,
}

impl Variables<'_> {
    fn fairness(&mut self, to: &mut QueueSettings) {
        let weight = |weight: &f64| weight.is_finite() && *weight >= 0.0;
        let (input, output) = to.token_weights;
        to.token_weights = (
            self.number("FAIRNESS_INPUT_TOKEN_WEIGHT", weight).unwrap_or(input),
            self.number("FAIRNESS_OUTPUT_TOKEN_WEIGHT", weight).unwrap_or(output),
        );
        let tokens = self.number("FAIRNESS_PRIORITY_TOKEN_WEIGHT", weight);
        let requests = self.number("FAIRNESS_PRIORITY_REQUEST_NUM_WEIGHT", weight);
        to.share_by = ShareBy::Tokens;
        match (tokens.unwrap_or(1.0), requests.unwrap_or(0.0)) {
            (tokens, requests) if tokens <= 0.0 && requests > 0.0 => to.share_by = ShareBy::Requests,
            (_, requests) if requests > 0.0 => self.notes.push(
                "FAIRNESS_PRIORITY_REQUEST_NUM_WEIGHT has no effect beside a weight of tokens: turns go by tokens"
                    .to_owned(),
            ),
            _ => {}
        }
        to.most_at_once = self
            .number("FAIRNESS_MAX_CONCURRENT", |_: &u32| true)
            .filter(|most| *most > 0)
            .or(to.most_at_once);
        // Kthena's default of 100 a second would cap whoever turns fairness on; here it is a cap for those who set it.
        if to.most_at_once.is_none() {
            let rate = self.number("FAIRNESS_MAX_QPS", |rate: &f64| RATES.contains(rate));
            to.most_per_second = rate.or(to.most_per_second);
        } else if (self.variable)("FAIRNESS_MAX_QPS").is_some() {
            let why = "FAIRNESS_MAX_QPS has no effect beside FAIRNESS_MAX_CONCURRENT".to_owned();
            self.notes.push(why);
        }
        if let Some(timeout) = self.time("FAIRNESS_QUEUE_TIMEOUT").filter(|timeout| !timeout.is_zero()) {
            to.timeout = Some(timeout);
        }
        for (name, why) in [
            (
                "FAIRNESS_WINDOW_SIZE",
                "a flow is charged for what it was given while others wait, not for a time",
            ),
            ("FAIRNESS_PRIORITY_REFRESH_RETRIES", "the order is always that of the moment"),
            ("FAIRNESS_REBUILD_THRESHOLD", "the order is always that of the moment"),
        ] {
            if (self.variable)(name).is_some() {
                self.notes.push(format!("{name} has no effect: {why}"));
            }
        }
    }

    fn session_boost(&mut self, to: &mut QueueSettings) {
        let header = (self.variable)("SESSION_BOOST_HEADER").unwrap_or_else(|| SESSION_HEADER.to_owned());
        let sessions =
            self.number("SESSION_BOOST_MAX_SESSIONS", |most: &usize| *most > 0).unwrap_or(SESSIONS);
        to.share_by = ShareBy::Nothing;
        to.order =
            Order::Session { header: header.trim().to_ascii_lowercase().into(), boost: HEAD_START, sessions };
        let each = self.number("SESSION_BOOST_INFLIGHT_PER_POD", |most: &u32| *most > 0).unwrap_or(16);
        to.saturation.most_requests = Some(each as f32);
        // There, a pool has room only if one of its engines lets nobody wait.
        to.saturation.queue_depth = 1.0;
        let negative = |text: String| text.trim().starts_with('-');
        to.timeout = if (self.variable)("SESSION_BOOST_TIMEOUT").is_some_and(negative) {
            None
        } else {
            let timeout = self.time("SESSION_BOOST_TIMEOUT").unwrap_or(Duration::from_secs(30));
            Some(timeout).filter(|timeout| !timeout.is_zero())
        };
        if self.time("SESSION_BOOST_GRACE_PERIOD").is_some_and(|grace| !grace.is_zero()) {
            let why = "SESSION_BOOST_GRACE_PERIOD has no effect: room that is there is used";
            self.notes.push(why.to_owned());
        }
    }

    /// As Go reads it.
    fn is_true(&self, name: &str) -> bool {
        (self.variable)(name)
            .is_some_and(|value| ["1", "t", "T", "TRUE", "true", "True"].contains(&value.trim()))
    }

    fn number<N: FromStr>(&mut self, name: &str, fits: impl Fn(&N) -> bool) -> Option<N> {
        let text = (self.variable)(name)?;
        let found = text.trim().parse().ok().filter(fits);
        self.note_unusable(name, &text, found.is_some());
        found
    }

    fn time(&mut self, name: &str) -> Option<Duration> {
        let text = (self.variable)(name)?;
        let found = duration::parse(text.trim());
        self.note_unusable(name, &text, found.is_some());
        found
    }

    fn note_unusable(&mut self, name: &str, text: &str, usable: bool) {
        if !usable {
            self.notes.push(format!("{name}={text:?} cannot be used: the default stands"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(variables: &[(&str, &str)]) -> (QueueSettings, Vec<String>) {
        let mut settings = QueueSettings::default();
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let notes = apply(&mut settings, variable).unwrap();
        (settings, notes)
    }

    #[test]
    fn nothing_changes_unless_a_mode_is_on_and_both_exclude_each_other() {
        let (settings, notes) =
            applied(&[("FAIRNESS_MAX_QPS", "5"), ("ENABLE_FAIRNESS_SCHEDULING", "false")]);
        assert_eq!((settings, notes), (QueueSettings::default(), Vec::new()));
        let both = |_: &str| Some("true".to_owned());
        assert_eq!(apply(&mut QueueSettings::default(), both), Err(BothModes));
    }

    #[test]
    fn fairness_on_its_own_caps_nobody() {
        let (settings, notes) = applied(&[("ENABLE_FAIRNESS_SCHEDULING", "true")]);
        assert_eq!((settings, notes.len()), (QueueSettings::default(), 0));
    }

    #[test]
    fn what_fairness_is_set_to_is_honoured_and_what_cannot_be_is_told() {
        let (settings, notes) = applied(&[
            ("ENABLE_FAIRNESS_SCHEDULING", "1"),
            ("FAIRNESS_INPUT_TOKEN_WEIGHT", "0.5"),
            ("FAIRNESS_OUTPUT_TOKEN_WEIGHT", "-3"),
            ("FAIRNESS_MAX_CONCURRENT", "0"),
            ("FAIRNESS_MAX_QPS", "20"),
            ("FAIRNESS_QUEUE_TIMEOUT", "5s"),
            ("FAIRNESS_WINDOW_SIZE", "1h"),
            ("FAIRNESS_PRIORITY_REQUEST_NUM_WEIGHT", "2"),
        ]);
        assert_eq!(settings.token_weights, (0.5, 2.0));
        assert_eq!((settings.most_at_once, settings.most_per_second), (None, Some(20.0)));
        assert_eq!(settings.timeout, Some(Duration::from_secs(5)));
        let told: Vec<&str> = notes.iter().filter_map(|note| note.split([' ', '=']).next()).collect();
        let expected =
            ["FAIRNESS_OUTPUT_TOKEN_WEIGHT", "FAIRNESS_PRIORITY_REQUEST_NUM_WEIGHT", "FAIRNESS_WINDOW_SIZE"];
        assert_eq!(told, expected);
        let (settings, _) = applied(&[
            ("ENABLE_FAIRNESS_SCHEDULING", "true"),
            ("FAIRNESS_MAX_CONCURRENT", "8"),
            ("FAIRNESS_MAX_QPS", "20"),
            ("FAIRNESS_PRIORITY_TOKEN_WEIGHT", "0"),
            ("FAIRNESS_PRIORITY_REQUEST_NUM_WEIGHT", "1"),
        ]);
        assert_eq!((settings.most_at_once, settings.most_per_second), (Some(8), None));
        assert_eq!(settings.share_by, ShareBy::Requests);
    }

    #[test]
    fn session_boost_is_an_order_with_its_own_limits() {
        let (settings, notes) = applied(&[
            ("ENABLE_SESSION_BOOST", "true"),
            ("SESSION_BOOST_HEADER", "X-Chat"),
            ("SESSION_BOOST_TIMEOUT", "-1s"),
            ("SESSION_BOOST_GRACE_PERIOD", "2s"),
        ]);
        let order = Order::Session { header: "x-chat".into(), boost: HEAD_START, sessions: SESSIONS };
        assert_eq!((settings.order, settings.timeout, notes.len()), (order, None, 1));
        assert_eq!((settings.saturation.most_requests, settings.saturation.queue_depth), (Some(16.0), 1.0));
        for unusable in ["", "30", "soon"] {
            let variables = [("ENABLE_SESSION_BOOST", "true"), ("SESSION_BOOST_TIMEOUT", unusable)];
            assert_eq!(applied(&variables).0.timeout, Some(Duration::from_secs(30)), "{unusable}");
        }
        let never = [("ENABLE_SESSION_BOOST", "true"), ("SESSION_BOOST_TIMEOUT", "0")];
        assert_eq!(applied(&never).0.timeout, None);
    }
}
