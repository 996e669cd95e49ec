//! A configured scheduler: the filters, scorers and picker of a profile, and the block index they share.

use std::sync::Arc;

use smallvec::SmallVec;

use super::plugin::{Filter, Instance, Picker, Scorer, SharedNeeds};
use crate::index::{ApproximateIndex, TextIndex};
use crate::prompt::BlockNeeds;
use crate::session::{Affinity, Binding, Carrier};
use crate::usage::Attribute;

/// A filter under the name the configuration gave it.
#[derive(Clone, Debug)]
pub struct NamedFilter {
    /// Instance name.
    pub name: Arc<str>,
    /// The plugin.
    pub filter: Arc<dyn Filter>,
}

/// A scorer with its weight.
#[derive(Clone, Debug)]
pub struct Scored {
    /// Instance name.
    pub name: Arc<str>,
    /// Plugin type.
    pub kind: &'static str,
    /// Its weight in the sum.
    pub weight: f32,
    /// The plugin.
    pub scorer: Arc<dyn Scorer>,
}

/// A picker under its name.
#[derive(Clone, Debug)]
pub struct NamedPicker {
    /// Instance name.
    pub name: Arc<str>,
    /// The plugin.
    pub picker: Arc<dyn Picker>,
}

/// An ordered set of plugins.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Its name.
    pub name: Arc<str>,
    /// Filters in order; `subset` and `health` are always among them.
    pub filters: Vec<NamedFilter>,
    /// Scorers.
    pub scorers: Vec<Scored>,
    /// The picker.
    pub picker: NamedPicker,
}

/// All that scheduling is configured by.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The profile every request runs.
    pub profile: Arc<Profile>,
    /// Who was sent which blocks of text, if a plugin of the profile asks.
    pub text: Option<TextIndex>,
    /// Whether a plugin of the profile asks for tokens.
    pub tokens: bool,
    /// How the shared index is asked, if a plugin of the profile wants that.
    pub shared: Option<SharedNeeds>,
    /// Numbers of leading bytes of the prompt whose hash a plugin of the profile asks for.
    pub heads: SmallVec<[usize; 1]>,
    /// How sessions are bound, if a plugin of the profile asks; equal ways are one.
    pub affinities: SmallVec<[Arc<Affinity>; 1]>,
    /// What Envoy is told of responses.
    pub reports: Arc<[Arc<Attribute>]>,
}

/// Blocks of text remembered for all endpoints together: at about 100 bytes each, 1.6 GB at the very most.
const MOST_TEXT_BLOCKS: usize = 16 << 20;

/// A plugin as a configuration names it.
#[derive(Clone, Debug)]
pub struct Part {
    /// Instance name.
    pub name: Arc<str>,
    /// Plugin type.
    pub kind: &'static str,
    /// Weight, for scorers.
    pub weight: f32,
    /// The built plugin.
    pub instance: Instance,
    /// Whether its filter takes part.
    pub filters: bool,
    /// Whether its scorer takes part.
    pub scores: bool,
}

/// A profile that cannot be put together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PipelineError {
    /// Two pickers.
    #[error("a profile takes one picker, and {0:?} is the second: remove one")]
    SecondPicker(Arc<str>),
    /// Two cuts of the prompt.
    #[error(
        "{0:?} cuts prompts differently from another plugin of this profile: give both the same block size and limits"
    )]
    BlocksDiffer(Arc<str>),
    /// Two cookies with tokens: Envoy takes the one `set-cookie` of the endpoint that served from metadata.
    #[error(
        "a profile puts session tokens into one cookie, and that of {0:?} is the second: give both the same name"
    )]
    SecondCookie(Arc<str>),
}

impl Pipeline {
    /// Whether clients carry tokens.
    pub fn uses_tokens(&self) -> bool {
        self.affinities.iter().any(|affinity| affinity.token().is_some())
    }

    /// Puts a profile together. `subset` and `health` are put in front unless listed. The index of `previous` is kept if
    /// it cuts prompts in the same way, and its sessions if they are bound in the same way, so that a reload forgets nothing.
    pub fn assemble(
        name: &str,
        parts: Vec<Part>,
        previous: Option<&Pipeline>,
    ) -> Result<Self, PipelineError> {
        let mut filters = crate::plugins::standing_filters(&parts);
        // A session that is bound to an endpoint which cannot serve moves: that it cannot must be known before.
        let mut session_filters = Vec::new();
        let mut scorers = Vec::new();
        let mut picker = None;
        let mut blocks: Option<BlockNeeds> = None;
        let (mut tokens, mut held) = (false, false);
        let mut shared: Option<SharedNeeds> = None;
        let mut heads = SmallVec::new();
        let mut reports = Vec::new();
        let mut affinities: SmallVec<[Arc<Affinity>; 1]> = SmallVec::new();
        for part in parts {
            match (blocks, part.instance.needs.blocks) {
                (Some(a), Some(b)) if a != b => return Err(PipelineError::BlocksDiffer(part.name)),
                (None, Some(needs)) => blocks = Some(needs),
                _ => {}
            }
            let needs = part.instance.needs;
            if shared.zip(needs.shared).is_some_and(|(a, b)| a != b) {
                return Err(PipelineError::BlocksDiffer(part.name));
            }
            shared = shared.or(needs.shared);
            tokens |= needs.tokens || needs.held || needs.shared.is_some();
            held |= needs.held;
            let binds = needs.session.is_some();
            if let Some(binding) = needs.session
                && !affinities.iter().any(|affinity| affinity.binding == *binding)
            {
                let is_cookie = |binding: &Binding| matches!(binding, Binding::Token(Carrier::Cookie(_)));
                if is_cookie(&binding) && affinities.iter().any(|affinity| is_cookie(&affinity.binding)) {
                    return Err(PipelineError::SecondCookie(part.name));
                }
                let mut before = previous.into_iter().flat_map(|p| &p.affinities);
                let kept = before.find(|affinity| affinity.binding == *binding);
                affinities.push(kept.map_or_else(|| Arc::new(Affinity::new((*binding).clone())), Arc::clone));
            }
            heads.extend(needs.head_bytes.filter(|bytes| !heads.contains(bytes)));
            if let Some(filter) = part.instance.filter.filter(|_| part.filters) {
                let named = NamedFilter { name: Arc::clone(&part.name), filter };
                if binds { session_filters.push(named) } else { filters.push(named) }
            }
            if let Some(scorer) = part.instance.scorer.filter(|_| part.scores) {
                scorers.push(Scored {
                    name: Arc::clone(&part.name),
                    kind: part.kind,
                    weight: part.weight,
                    scorer,
                });
            }
            reports.extend(part.instance.reports.into_iter().flatten());
            if let Some(found) = part.instance.picker {
                if picker.is_some() {
                    return Err(PipelineError::SecondPicker(part.name));
                }
                picker = Some(NamedPicker { name: part.name, picker: found });
            }
        }
        filters.append(&mut session_filters);
        let picker = picker.unwrap_or_else(crate::plugins::default_picker);
        let text = blocks.or(held.then_some(BlockNeeds::DEFAULT)).map(|needs| {
            let kept = previous.and_then(|p| p.text.clone()).filter(|text| text.needs == needs);
            kept.unwrap_or_else(|| TextIndex {
                needs,
                routed: Arc::new(ApproximateIndex::new(MOST_TEXT_BLOCKS)),
            })
        });
        Ok(Self {
            profile: Arc::new(Profile { name: name.into(), filters, scorers, picker }),
            text,
            tokens,
            shared,
            heads,
            affinities,
            reports: reports.into(),
        })
    }
}
