//! Faults that the engine plays on demand: each one is a way in which real engines were seen to fail.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// One way to misbehave. The text form is `kind` or `kind:argument`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// `refuse[:SECONDS]`: the port is closed, for ever or for a time.
    Refuse(Option<Duration>),
    /// `reset`: a connection is reset as soon as it is accepted.
    ResetAccept,
    /// `reset:request`: a connection is reset once the whole request was read.
    ResetRequest,
    /// `503`: the admission error of a full engine.
    Status503,
    /// `500`: what a draining vLLM answers while `/health` is 200.
    Status500,
    /// `stall`: a request is read and nothing is ever sent.
    StallBefore,
    /// `stall-stream[:TOKENS]`: a stream stops after so many tokens (default 1) and stays open.
    StallInStream(u32),
    /// `cut-stream[:TOKENS]`: the connection is reset after so many tokens (default 1).
    CutStream(u32),
    /// `stall-metrics`: `/metrics` never answers.
    StallMetrics,
    /// `slow:FACTOR`: every step takes that many times longer.
    Slow(f64),
    /// `sleep[:LEVEL]`: requests hang, gauges read 0, `/health` stays 200.
    Sleep(u8),
    /// `silent-shutdown`: the port closes and open streams get neither data nor an end.
    SilentShutdown,
    /// `die`: streams end with an error event, new requests get 500 and `/health` 503.
    Die,
    /// `restart`: running requests end with an error, the cache is empty, KV events start from 0. Happens once.
    Restart,
    /// `drop-events[:N]`: the next N batches of KV events (default 1) are not sent; the replay socket has them.
    DropEvents(u32),
    /// `lose-events[:N]`: the same, and the replay socket does not have them.
    LoseEvents(u32),
    /// `event-block-size:N`: KV events tell of blocks of N tokens.
    EventBlockSize(u32),
    /// `event-hash-seed`: KV events call blocks by other hashes.
    EventHashSeed,
    /// `unreadable-events`: KV events are no msgpack.
    UnreadableEvents,
}

/// A fault that could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown fault {0:?}: use refuse[:SECONDS], reset[:request], 503, 500, stall, stall-stream[:TOKENS], \
     cut-stream[:TOKENS], stall-metrics, slow:FACTOR, sleep[:1|2], silent-shutdown, die, \
     restart, drop-events[:N], lose-events[:N], event-block-size:N, event-hash-seed or unreadable-events"
)]
pub struct UnknownFault(pub String);

impl FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || UnknownFault(text.to_owned());
        let (kind, argument) = match text.split_once(':') {
            Some((kind, argument)) => (kind, Some(argument)),
            None => (text, None),
        };
        let tokens = || argument.map_or(Ok(1), str::parse).map_err(|_| error());
        let positive =
            |value: &str| value.parse::<f64>().ok().filter(|v| v.is_finite() && *v > 0.0 && *v < 1e9);
        match (kind, argument) {
            ("refuse", None) => Ok(Self::Refuse(None)),
            ("refuse", Some(seconds)) => {
                Ok(Self::Refuse(Some(Duration::from_secs_f64(positive(seconds).ok_or_else(error)?))))
            }
            ("reset", None | Some("accept")) => Ok(Self::ResetAccept),
            ("reset", Some("request")) => Ok(Self::ResetRequest),
            ("503", None) => Ok(Self::Status503),
            ("500", None) => Ok(Self::Status500),
            ("stall", None) => Ok(Self::StallBefore),
            ("stall-stream", _) => tokens().map(Self::StallInStream),
            ("cut-stream", _) => tokens().map(Self::CutStream),
            ("stall-metrics", None) => Ok(Self::StallMetrics),
            ("slow", Some(factor)) => positive(factor).map(Self::Slow).ok_or_else(error),
            ("sleep", None | Some("1")) => Ok(Self::Sleep(1)),
            ("sleep", Some("2")) => Ok(Self::Sleep(2)),
            ("silent-shutdown", None) => Ok(Self::SilentShutdown),
            ("die", None) => Ok(Self::Die),
            ("restart", None) => Ok(Self::Restart),
            ("drop-events", _) => tokens().map(Self::DropEvents),
            ("lose-events", _) => tokens().map(Self::LoseEvents),
            ("event-block-size", Some(size)) => {
                size.parse().ok().filter(|size| *size > 0).map(Self::EventBlockSize).ok_or_else(error)
            }
            ("event-hash-seed", None) => Ok(Self::EventHashSeed),
            ("unreadable-events", None) => Ok(Self::UnreadableEvents),
            _ => Err(error()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refuse(None) => f.write_str("refuse"),
            Self::Refuse(Some(time)) => write!(f, "refuse:{}", time.as_secs_f64()),
            Self::ResetAccept => f.write_str("reset"),
            Self::ResetRequest => f.write_str("reset:request"),
            Self::Status503 => f.write_str("503"),
            Self::Status500 => f.write_str("500"),
            Self::StallBefore => f.write_str("stall"),
            Self::StallInStream(tokens) => write!(f, "stall-stream:{tokens}"),
            Self::CutStream(tokens) => write!(f, "cut-stream:{tokens}"),
            Self::StallMetrics => f.write_str("stall-metrics"),
            Self::Slow(factor) => write!(f, "slow:{factor}"),
            Self::Sleep(level) => write!(f, "sleep:{level}"),
            Self::SilentShutdown => f.write_str("silent-shutdown"),
            Self::Die => f.write_str("die"),
            Self::Restart => f.write_str("restart"),
            Self::DropEvents(batches) => write!(f, "drop-events:{batches}"),
            Self::LoseEvents(batches) => write!(f, "lose-events:{batches}"),
            Self::EventBlockSize(tokens) => write!(f, "event-block-size:{tokens}"),
            Self::EventHashSeed => f.write_str("event-hash-seed"),
            Self::UnreadableEvents => f.write_str("unreadable-events"),
        }
    }
}

/// The faults in force.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// Adds a fault, replacing one of the same kind.
    pub fn set(&mut self, fault: Fault) {
        self.clear(fault);
        self.0.push(fault);
    }

    /// Ends the fault of this kind, whatever its argument.
    pub fn clear(&mut self, fault: Fault) {
        self.0.retain(|other| std::mem::discriminant(other) != std::mem::discriminant(&fault));
    }

    /// Ends all faults.
    pub fn clear_all(&mut self) {
        self.0.clear();
    }

    /// Faults in force, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Fault> + '_ {
        self.0.iter().copied()
    }

    pub(super) fn has(&self, fault: Fault) -> bool {
        self.0.contains(&fault)
    }

    pub(super) fn refuses(&self) -> bool {
        self.iter().any(|fault| matches!(fault, Fault::Refuse(_)))
    }

    /// How long the port stays closed, absent for ever.
    pub(super) fn refusal_time(&self) -> Option<Duration> {
        self.iter().find_map(|fault| if let Fault::Refuse(time) = fault { time } else { None })
    }

    pub(super) fn slowdown(&self) -> f64 {
        self.iter()
            .find_map(|fault| if let Fault::Slow(factor) = fault { Some(factor) } else { None })
            .unwrap_or(1.0)
    }

    pub(super) fn sleep_level(&self) -> u8 {
        self.iter()
            .find_map(|fault| if let Fault::Sleep(level) = fault { Some(level) } else { None })
            .unwrap_or(0)
    }

    pub(super) fn stalls_stream_after(&self) -> Option<u32> {
        self.iter()
            .find_map(|fault| if let Fault::StallInStream(tokens) = fault { Some(tokens) } else { None })
    }

    pub(super) fn cuts_stream_after(&self) -> Option<u32> {
        self.iter().find_map(|fault| if let Fault::CutStream(tokens) = fault { Some(tokens) } else { None })
    }

    pub(super) fn event_block_size(&self) -> Option<u32> {
        self.iter()
            .find_map(|fault| if let Fault::EventBlockSize(tokens) = fault { Some(tokens) } else { None })
    }

    pub(super) fn has_other_seed(&self) -> bool {
        self.has(Fault::EventHashSeed)
    }

    pub(super) fn has_unreadable_events(&self) -> bool {
        self.has(Fault::UnreadableEvents)
    }

    /// True while the engine computes nothing.
    pub(super) fn frozen(&self) -> bool {
        self.sleep_level() > 0 || self.has(Fault::SilentShutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("refuse", Fault::Refuse(None))]
    #[case("refuse:1.5", Fault::Refuse(Some(Duration::from_millis(1500))))]
    #[case("reset", Fault::ResetAccept)]
    #[case("reset:request", Fault::ResetRequest)]
    #[case("503", Fault::Status503)]
    #[case("500", Fault::Status500)]
    #[case("stall", Fault::StallBefore)]
    #[case("stall-stream:3", Fault::StallInStream(3))]
    #[case("cut-stream:2", Fault::CutStream(2))]
    #[case("stall-metrics", Fault::StallMetrics)]
    #[case("slow:2.5", Fault::Slow(2.5))]
    #[case("sleep:2", Fault::Sleep(2))]
    #[case("silent-shutdown", Fault::SilentShutdown)]
    #[case("die", Fault::Die)]
    #[case("restart", Fault::Restart)]
    #[case("drop-events:3", Fault::DropEvents(3))]
    #[case("lose-events:2", Fault::LoseEvents(2))]
    #[case("event-block-size:64", Fault::EventBlockSize(64))]
    #[case("event-hash-seed", Fault::EventHashSeed)]
    #[case("unreadable-events", Fault::UnreadableEvents)]
    fn texts_round_trip(#[case] text: &str, #[case] fault: Fault) {
        assert_eq!(text.parse(), Ok(fault));
        assert_eq!(fault.to_string(), text);
    }

    #[rstest::rstest]
    #[case("")]
    #[case("slow")]
    #[case("slow:0")]
    #[case("slow:nan")]
    #[case("sleep:3")]
    #[case("stall-stream:x")]
    #[case("refuse:-1")]
    #[case("event-block-size:0")]
    fn bad_texts_are_refused(#[case] text: &str) {
        assert_eq!(text.parse::<Fault>(), Err(UnknownFault(text.to_owned())));
    }

    #[test]
    fn a_new_argument_replaces_the_old_one() {
        let mut faults = Faults::default();
        faults.set(Fault::Slow(2.0));
        faults.set(Fault::Status503);
        faults.set(Fault::Slow(4.0));
        assert!((faults.slowdown() - 4.0).abs() < 1e-9);
        faults.clear(Fault::Slow(9.0));
        assert_eq!(faults.iter().collect::<Vec<_>>(), [Fault::Status503]);
    }
}
