//! The end of a request: its numbers are counted, learned from and written down.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::progress::{AccessLogFacts, Progress};
use super::{Closing, Ledger, learn, log};
use crate::admission::limits::{Charge, Tokens};
use crate::decision::Outcome;
use crate::metrics::{Degraded, PoolMetrics};
use crate::request::BYTES_PER_TOKEN;
use crate::state::pool::BrokenCause;
use crate::state::signals::Millis;
use crate::state::{Endpoint, Member};
use crate::usage::{Usage, UsageSource};

impl Ledger {
    /// Settles a request with all that is known of it.
    pub(super) fn conclude(&self, mut closing: Closing, facts: Option<&AccessLogFacts>) {
        closing.leg = None;
        closing.end_turn();
        let progress = &closing.progress;
        let status =
            Some(progress.status).filter(|status| *status > 0).or(facts.map(|f| f.status)).unwrap_or(0);
        let from_upstream = progress.from_upstream.or(facts.map(|f| f.from_upstream));
        let served_at = progress.served.or(facts.and_then(|f| f.served));
        let attempts = progress.attempts.max(facts.map_or(0, |f| f.attempts));
        let member = served_at.and_then(|address| closing.pool.member_at(address)).cloned();
        // An address outside the pool (Envoy's fallback) is nobody's credit.
        let member = member.or_else(|| served_at.is_none().then(|| chosen(&closing, attempts)).flatten());
        let outcome = outcome(progress, facts, status, from_upstream);

        let counted = &closing.pool.memory.metrics;
        if outcome == Outcome::Aborted {
            self.aborted.fetch_add(1, Ordering::Relaxed);
        } else {
            counted.served.add(status);
        }
        if let (Outcome::Broken, Some(member)) = (outcome, &member) {
            let cause = facts.and_then(|f| f.broken).unwrap_or(broken_cause(progress));
            member.broken[cause as usize].fetch_add(1, Ordering::Relaxed);
        }
        learn_health(&closing, member.as_deref(), attempts, status, from_upstream, outcome);
        if status == 404
            && from_upstream != Some(false)
            && let Some(member) = &member
        {
            (self.on_unknown_model)(&member.endpoint);
        }

        if let Some(member) =
            member.as_ref().filter(|_| from_upstream != Some(false) && (1..500).contains(&status))
        {
            keep_sessions(&closing, member);
        }

        // The first byte of a whole response is its last token's, not its first's.
        let first_token = progress.time_to_first_token().or(facts.and_then(|f| f.time_to_first_token));
        let first_token = first_token.filter(|_| closing.stream);
        if let Some(first_token) = first_token.filter(|_| (200..300).contains(&status) || status == 0) {
            let first_token = first_token + closing.record.stages.prefill;
            counted.time_to_first_token.observe(first_token.as_secs_f64());
        }
        if let Some(decided) =
            progress.decided.filter(|_| closing.record.was_split() && outcome == Outcome::Complete)
        {
            let ended = closing.started + closing.record.stages.total;
            counted.disaggregation.decode.observe(ended.duration_since(decided).as_secs_f64());
        }
        let usage = settle_usage(&closing, facts, outcome, status);
        if let Some(charge) = closing.charge.take() {
            let seen =
                progress.response_begun || facts.is_some_and(|f| f.response_bytes > 0 || f.usage.is_some());
            let usage = usage.map(|(usage, _)| usage).filter(|_| seen || !closing.sees_response_body);
            settle_charge(*charge, usage, status);
        }
        if let Some((usage, source)) = usage {
            self.note_source(source);
            self.metrics.usage[source as usize].fetch_add(1, Ordering::Relaxed);
            count_usage(counted, member.as_ref().map(|m| &*m.endpoint), usage);
            learn_output(&closing, facts, usage, source, outcome);
            if let Some(member) = member.as_ref().filter(|_| outcome == Outcome::Complete) {
                learn::rates(&closing, member, first_token, usage);
                learn::truth(&closing, member, usage);
                learn::answer(&closing, member, usage, &self.tokens);
            }
        }

        if let Some(mut bill) = closing.bill.take() {
            match usage {
                Some((usage, _)) => bill.used(usage.prompt, usage.completion),
                // A client that left early may have had its prompt computed.
                None if outcome == Outcome::Aborted => bill.used(closing.record.prompt_tokens, 0),
                None => bill.waive(),
            }
            if outcome == Outcome::Complete {
                bill.completed();
            }
        }
        let mut record = closing.record;
        record.status = status;
        record.attempts = attempts;
        record.served = served_at.map(|address| {
            member
                .as_ref()
                .filter(|m| m.endpoint.address == address)
                .map_or_else(|| address.to_string().into(), |m| Arc::clone(&m.endpoint.destination))
        });
        record.usage = usage;
        record.reported_cached_tokens = usage.and_then(|(usage, _)| usage.cached);
        record.stages.first_token = first_token;
        record.outcome = outcome;
        log::served(&record);
        self.ring.push(Arc::from(record));
    }

    /// Warns where no source of token usage has ever spoken. One that speaks at times may be silent for good reasons.
    fn note_source(&self, source: UsageSource) {
        if source != UsageSource::Estimate {
            self.usage_comes.store(true, Ordering::Relaxed);
            if self.metrics.set_degraded(Degraded::Usage, false) {
                tracing::info!(source = source.name(), "token usage is reported");
            }
        } else if !self.usage_comes.load(Ordering::Relaxed)
            && self.metrics.set_degraded(Degraded::Usage, true)
        {
            tracing::warn!(
                "nobody reports token usage, so requests are settled by estimates: set response_body_mode \
                 FULL_DUPLEX_STREAMED, or let Envoy's usage filter or access log report it"
            );
        }
    }
}

/// Sessions stay with who has their cache now.
fn keep_sessions(closing: &Closing, served: &Member) {
    let Some(picked) = closing.ranked.first() else { return };
    for session in &closing.sessions {
        session.served_by(served.endpoint.slot, picked.slot, Millis::now());
    }
}

/// Who served if nobody says: the choice, or the alternative that the number of attempts points to.
fn chosen(closing: &Closing, attempts: u32) -> Option<Arc<Member>> {
    let at = (attempts.max(1) as usize - 1).min(closing.ranked.len().saturating_sub(1));
    closing.pool.member_at(closing.ranked.get(at)?.address).cloned()
}

fn outcome(
    progress: &Progress,
    facts: Option<&AccessLogFacts>,
    status: u16,
    from_upstream: Option<bool>,
) -> Outcome {
    // Envoy's own answer in an engine's place has a body, too; nothing broke that had begun.
    if from_upstream == Some(false) && status >= 500 {
        return Outcome::Failed;
    }
    let failed = status >= 500 || progress.saw_error;
    if let Some((facts, cause)) = facts.and_then(|f| Some((f, f.broken?)))
        && !progress.complete
    {
        // A status without a byte of the body: the headers of a stream come long before its first token.
        let headers_came = (1..500).contains(&status) && cause != BrokenCause::Client;
        return if progress.response_begun || facts.response_bytes > 0 || headers_came {
            Outcome::Broken
        } else if status >= 500 {
            Outcome::Failed
        } else {
            Outcome::Aborted
        };
    }
    match (progress.complete || progress.saw_done, facts) {
        (true, _) | (false, Some(_)) => {
            if failed {
                Outcome::Failed
            } else {
                Outcome::Complete
            }
        }
        // Where the end would have been seen, its absence says enough.
        (false, None) if progress.first_byte.is_some() => Outcome::Broken,
        (false, None) if failed => Outcome::Failed,
        (false, None) => Outcome::Ended,
    }
}

fn broken_cause(progress: &Progress) -> BrokenCause {
    if progress.saw_error { BrokenCause::Upstream } else { BrokenCause::Unknown }
}

/// Attempts beyond the first failed at the endpoints before the one that served, in the order they were ranked.
fn learn_health(
    closing: &Closing,
    served: Option<&Member>,
    attempts: u32,
    status: u16,
    from_upstream: Option<bool>,
    outcome: Outcome,
) {
    for endpoint in closing.ranked.iter().take((attempts as usize).saturating_sub(1)) {
        if served.is_none_or(|served| served.endpoint.slot != endpoint.slot) {
            missed(endpoint);
        }
    }
    let Some(served) = served else { return };
    match from_upstream {
        Some(false) if status == 503 && outcome == Outcome::Failed => {
            // Envoy's own 503: it reached nobody it tried.
            missed(&served.endpoint);
        }
        Some(false) => {}
        // The status of a response that broke is from its beginning; it says nothing of the engine now.
        _ if outcome == Outcome::Broken => {}
        _ if status > 0 => served.endpoint.health.answered(status, Millis::now()),
        _ => {}
    }
}

fn missed(endpoint: &Endpoint) {
    if endpoint.health.missed(Millis::now()) {
        tracing::info!(endpoint = &*endpoint.destination, name = %endpoint.name, "endpoint is down: requests fail there");
    }
}

/// The counts to settle by, best source first; none for a request that reached no engine.
fn settle_usage(
    closing: &Closing,
    facts: Option<&AccessLogFacts>,
    outcome: Outcome,
    status: u16,
) -> Option<(Usage, UsageSource)> {
    let progress = &closing.progress;
    if let Some(usage) = progress.usage_in_trailers {
        return Some((usage, UsageSource::Trailers));
    }
    if let Some(usage) = progress.usage_scanned {
        return Some((usage, UsageSource::Scanner));
    }
    if let Some(usage) = facts.and_then(|f| f.usage) {
        return Some((usage, UsageSource::AccessLog));
    }
    if matches!(outcome, Outcome::Aborted) || !(status == 0 || (200..300).contains(&status)) {
        return None;
    }
    // A request that asks for no tokens, such as a list of models, costs none.
    if closing.record.prompt_tokens == 0 && closing.expected_output == 0 {
        return None;
    }
    let bytes = progress.response_bytes.max(facts.map_or(0, |f| f.response_bytes));
    let completion = estimate_output(closing, bytes, outcome);
    Some((Usage { prompt: closing.record.prompt_tokens, completion, cached: None }, UsageSource::Estimate))
}

/// Output tokens by what was seen of the response; never 0 where something was, else never more than was asked for.
fn estimate_output(closing: &Closing, bytes: u64, outcome: Outcome) -> u64 {
    let learned = &closing.pool.memory.learned;
    let per_token =
        if closing.stream { &learned.stream_bytes_per_token } else { &learned.whole_bytes_per_token };
    let seen = match (bytes, outcome) {
        (0, Outcome::Broken) => return 0,
        (0, _) => return closing.expected_output,
        _ => output_seen(per_token.get(), closing.progress.events, bytes, outcome),
    };
    let most = closing.most_output.unwrap_or(u64::MAX);
    seen.unwrap_or(closing.expected_output).min(most).max(1)
}

/// By whichever says more: tokens without text come as events that are small beside those that were learned from, and one
/// event may hold several tokens.
fn output_seen(per_token: Option<f64>, events: u64, bytes: u64, outcome: Outcome) -> Option<u64> {
    let by_bytes = match per_token {
        Some(per_token) => Some((bytes as f64 / per_token).round() as u64),
        None if events == 0 && outcome == Outcome::Broken => Some(bytes / BYTES_PER_TOKEN as u64),
        None => None,
    };
    by_bytes.max(Some(events).filter(|events| *events > 0))
}

/// Replaces a charge by what was used. A request that was answered an error comes back whole; of one whose client left before
/// anything was seen of a response, the prompt was read all the same.
pub(super) fn settle_charge(charge: Charge, usage: Option<Usage>, status: u16) {
    let taken = charge.taken();
    match usage {
        Some(usage) => {
            // A witness that counts answers only says nothing of the prompt.
            let input = if usage.prompt > 0 { usage.prompt } else { taken.input };
            charge.settle(Tokens { input, output: usage.completion });
        }
        None if status == 0 || (200..300).contains(&status) => charge.settle(Tokens { output: 0, ..taken }),
        None => drop(charge),
    }
}

fn count_usage(counted: &PoolMetrics, endpoint: Option<&Endpoint>, usage: Usage) {
    counted.prompt_tokens.fetch_add(usage.prompt, Ordering::Relaxed);
    counted.output_tokens.fetch_add(usage.completion, Ordering::Relaxed);
    if let Some(cached) = usage.cached {
        counted.cached_tokens.fetch_add(cached, Ordering::Relaxed);
        if let Some(endpoint) = endpoint {
            endpoint.reported_cached_tokens.fetch_add(cached, Ordering::Relaxed);
        }
    }
}

/// Learns from counts that an engine gave for a whole response; estimates teach nothing.
fn learn_output(
    closing: &Closing,
    facts: Option<&AccessLogFacts>,
    usage: Usage,
    source: UsageSource,
    outcome: Outcome,
) {
    if source == UsageSource::Estimate || outcome != Outcome::Complete || usage.completion == 0 {
        return;
    }
    let learned = &closing.pool.memory.learned;
    learned.output_tokens.learn(usage.completion as f64);
    let bytes = closing.progress.response_bytes.max(facts.map_or(0, |f| f.response_bytes));
    if bytes > 0 {
        let per_token = bytes as f64 / usage.completion as f64;
        let mean =
            if closing.stream { &learned.stream_bytes_per_token } else { &learned.whole_bytes_per_token };
        mean.learn(per_token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::what_was_learned(Some(100.0), 0, 900, Outcome::Complete, Some(9))]
    #[case::more_events(Some(100.0), 40, 900, Outcome::Complete, Some(40))]
    #[case::several_tokens_an_event(Some(100.0), 2, 900, Outcome::Complete, Some(9))]
    #[case::nothing_learned(None, 40, 900, Outcome::Broken, Some(40))]
    #[case::unseen_and_broken(None, 0, 900, Outcome::Broken, Some(225))]
    #[case::unseen(None, 0, 900, Outcome::Complete, None)]
    fn output_is_estimated_by_what_says_more(
        #[case] per_token: Option<f64>,
        #[case] events: u64,
        #[case] bytes: u64,
        #[case] outcome: Outcome,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(output_seen(per_token, events, bytes, outcome), expected);
    }

    #[rstest]
    #[case::before_an_answer(0, 0, false, BrokenCause::Client, Outcome::Aborted)]
    #[case::client_before_the_first_byte(200, 0, false, BrokenCause::Client, Outcome::Aborted)]
    #[case::client_after_some(200, 900, false, BrokenCause::Client, Outcome::Broken)]
    #[case::engine_before_the_first_byte(200, 0, false, BrokenCause::Upstream, Outcome::Broken)]
    #[case::engine_after_some(200, 900, false, BrokenCause::Upstream, Outcome::Broken)]
    #[case::engine_after_headers_that_we_saw(200, 0, true, BrokenCause::Upstream, Outcome::Broken)]
    #[case::engine_before_an_answer(503, 0, false, BrokenCause::Upstream, Outcome::Failed)]
    #[case::timeout_before_an_answer(504, 0, false, BrokenCause::Timeout, Outcome::Failed)]
    #[case::timeout_before_the_first_byte(200, 0, false, BrokenCause::Timeout, Outcome::Broken)]
    fn what_broke(
        #[case] status: u16,
        #[case] response_bytes: u64,
        #[case] response_begun: bool,
        #[case] cause: BrokenCause,
        #[case] expected: Outcome,
    ) {
        let progress = Progress { response_begun, ..Progress::default() };
        let facts =
            AccessLogFacts { status, response_bytes, broken: Some(cause), ..AccessLogFacts::default() };
        assert_eq!(outcome(&progress, Some(&facts), status, None), expected);
    }
}
