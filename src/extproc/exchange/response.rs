//! The response half: what passes is read, never held, and changed only where a usage event is withheld.

use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders};
use tokio::time::Instant;

use super::{Exchange, MAX_PIECE, Outbox, Phase, Step};
use crate::extproc::mode::BodyMode;
use crate::extproc::{message, reply};
use crate::session::Issuer;
use crate::settle::UpstreamFacts;
use crate::state::Endpoint;
use crate::usage::{Forward, Scanner, Usage};

impl Exchange {
    pub(super) fn response_headers(
        &mut self,
        headers: HttpHeaders,
        facts: &UpstreamFacts,
        told_to_tests: Option<&str>,
        out: &mut Outbox,
    ) -> Step {
        let was_unanswered = self.is_unanswered();
        let head = message::head(headers.headers);
        self.progress.learn(facts);
        if let Some(status) =
            head.get(":status").or_else(|| head.get("status")).and_then(|text| text.parse().ok())
        {
            self.progress.status = status;
        }
        let mut set = self
            .told()
            .map(|(tokens, endpoint)| reply::session_headers(tokens, endpoint))
            .unwrap_or_default();
        set.extend(told_to_tests.map(reply::served_header));
        set.extend(self.standing.iter().flat_map(reply::standing_headers));
        out.push_back(reply::response_headers(set));
        self.progress.response_begun = true;
        self.progress.complete |= headers.end_of_stream;
        if was_unanswered {
            // Envoy answers in our place; the body of its answer still passes through us where bodies do.
            self.finish();
            self.phase = Phase::Responding;
            return Step::Abandon;
        }
        self.phase = Phase::Responding;
        if !headers.end_of_stream && self.sees_response_body() {
            let scanner =
                Scanner::new(head.get("content-type"), head.get("content-encoding"), self.withhold_usage);
            self.scanner = Some(scanner);
        }
        Step::ResponseHeaders
    }

    /// The endpoint that the client's session is bound to from now on, if an engine of the pool has answered.
    fn told(&self) -> Option<(&Issuer, &Endpoint)> {
        let progress = &self.progress;
        if progress.from_upstream == Some(false) || progress.status >= 500 {
            return None;
        }
        let tokens = self.tokens.as_deref()?;
        Some((tokens, tokens.served(progress.served, progress.attempts)?))
    }

    pub(super) fn response_body(&mut self, body: HttpBody, now: Instant, out: &mut Outbox) -> Step {
        if self.phase != Phase::Responding && self.phase != Phase::Start {
            return Step::Wait;
        }
        self.phase = Phase::Responding;
        let HttpBody { body: bytes, end_of_stream, .. } = body;
        let first = !bytes.is_empty() && self.progress.first_byte.is_none();
        if first {
            self.progress.first_byte = Some(now);
        }
        self.progress.response_begun = true;
        self.progress.response_bytes += bytes.len() as u64;
        let withhold = self.withhold_usage;
        // Response headers may be skipped by configuration; then the content says what it is.
        let scanner = self.scanner.get_or_insert_with(|| Scanner::new(None, None, withhold));
        let mut forward = scanner.push(&bytes);
        if end_of_stream {
            let rest = scanner.finish();
            if !rest.is_empty() {
                forward = match forward {
                    Forward::Unchanged => Forward::Replaced([bytes.as_slice(), &rest].concat()),
                    Forward::Replaced(mut sent) => {
                        sent.extend_from_slice(&rest);
                        Forward::Replaced(sent)
                    }
                };
            }
            self.progress.complete = true;
            self.note_scanned();
        }
        if self.modes.response == BodyMode::FullDuplex {
            let bytes = match forward {
                Forward::Unchanged => bytes,
                Forward::Replaced(bytes) => bytes,
            };
            Self::pieces(bytes, end_of_stream, out);
        } else {
            let replaced = match forward {
                Forward::Unchanged => None,
                Forward::Replaced(bytes) => Some(bytes),
            };
            out.push_back(reply::response_body(replaced));
        }
        if end_of_stream {
            self.attach_usage(out);
        }
        if first { Step::FirstByte } else { Step::Wait }
    }

    fn pieces(mut bytes: Vec<u8>, end_of_stream: bool, out: &mut Outbox) {
        while bytes.len() > MAX_PIECE {
            let rest = bytes.split_off(MAX_PIECE);
            out.push_back(reply::response_piece(bytes, false));
            bytes = rest;
        }
        if !bytes.is_empty() || end_of_stream {
            out.push_back(reply::response_piece(bytes, end_of_stream));
        }
    }

    pub(super) fn response_trailers(&mut self, out: &mut Outbox) -> Step {
        self.progress.response_begun = true;
        self.progress.complete = true;
        self.progress.trailers = true;
        if let Some(mut scanner) = self.scanner.take() {
            let rest = scanner.finish();
            if !rest.is_empty() && self.modes.response == BodyMode::FullDuplex {
                Self::pieces(rest, false, out);
            }
            self.scanner = Some(scanner);
            self.note_scanned();
        }
        out.push_back(reply::continue_response_trailers());
        self.attach_usage(out);
        Step::Wait
    }

    /// The stream ends: reads what the scanner has.
    pub fn note_scanned(&mut self) {
        if let Some(scanner) = &self.scanner {
            self.progress.usage_scanned = scanner.usage();
            self.progress.events = scanner.events();
            self.progress.saw_error = scanner.saw_error();
            self.progress.saw_done = scanner.saw_done();
        }
    }

    /// The last reply of a response tells Envoy what it cost, for its logs and limits.
    fn attach_usage(&self, out: &mut Outbox) {
        let Some(last) = out.back_mut() else { return };
        if let Some(usage) = self.progress.usage() {
            last.dynamic_metadata = Some(reply::usage(&usage, &self.reports));
        } else if self.charged_by_envoy && self.progress.events > 0 {
            // Nobody counts: about one token an event.
            let seen = Usage { completion: self.progress.events, ..Usage::default() };
            last.dynamic_metadata = Some(reply::usage(&seen, &[]));
        }
    }
}
