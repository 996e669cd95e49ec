//! A configured scheduler: the filters, scorers and picker of a profile, and the block index they share.

use std::sync::Arc;

use smallvec::SmallVec;

use super::cost::CostModel;
use super::plugin::{Filter, Instance, PdDecider, Picker, Scorer, SharedNeeds};
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

impl Profile {
    /// The model behind its scores, if they are costs and nothing else.
    pub fn cost_model(&self) -> Option<CostModel> {
        match &self.scorers[..] {
            [only] => only.scorer.cost_model(),
            _ => None,
        }
    }

    /// The sum of its weights: the most that a candidate can score.
    pub fn weights(&self) -> f32 {
        self.scorers.iter().map(|scored| scored.weight).sum()
    }
}

/// All that scheduling is configured by.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The profile every request runs; where requests are split, for who generates the output.
    pub profile: Arc<Profile>,
    /// The profile for who computes the prompt, where requests are split.
    pub prefill: Arc<Profile>,
    /// Whether they are.
    pub decider: Arc<dyn PdDecider>,
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

    /// Puts a pipeline of one profile together: it picks who computes prompts as well as who generates outputs. See
    /// [`Pipeline::assemble_pair`].
    pub fn assemble(
        name: &str,
        parts: Vec<Part>,
        previous: Option<&Pipeline>,
    ) -> Result<Self, PipelineError> {
        let draft = Draft { name: name.into(), parts };
        Self::assemble_pair(draft, None, previous)
    }

    /// Puts profiles together: one for whole requests and outputs, and one for prompts unless it is the same. `subset`, `role`
    /// and `health` are put in front unless listed. The index of `previous` is kept if it cuts prompts in the same way, and its
    /// sessions if they are bound in the same way, so that a reload forgets nothing.
    pub fn assemble_pair(
        serving: Draft,
        prefill: Option<Draft>,
        previous: Option<&Pipeline>,
    ) -> Result<Self, PipelineError> {
        let mut wanted = Wanted::default();
        let profile = Arc::new(serving.profile(&mut wanted, previous)?);
        let prefill = match prefill {
            Some(draft) => Arc::new(draft.profile(&mut wanted, previous)?),
            None => Arc::clone(&profile),
        };
        let needs = wanted.blocks.or(wanted.held.then_some(BlockNeeds::DEFAULT));
        let text = needs.map(|needs| {
            let kept = previous.and_then(|p| p.text.clone()).filter(|text| text.needs == needs);
            kept.unwrap_or_else(|| TextIndex {
                needs,
                routed: Arc::new(ApproximateIndex::new(MOST_TEXT_BLOCKS)),
            })
        });
        Ok(Self {
            profile,
            prefill,
            decider: crate::plugins::default_decider(),
            text,
            tokens: wanted.tokens,
            shared: wanted.shared,
            heads: wanted.heads,
            affinities: wanted.affinities,
            reports: wanted.reports.into(),
        })
    }

    /// The same, with what decides which requests are split.
    pub fn with_decider(self, decider: Arc<dyn PdDecider>) -> Self {
        Self { decider, ..self }
    }
}

/// A profile that is not put together yet.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Its name.
    pub name: Arc<str>,
    /// Its plugins.
    pub parts: Vec<Part>,
}

/// What the plugins of all profiles need together.
#[derive(Default)]
struct Wanted {
    blocks: Option<BlockNeeds>,
    tokens: bool,
    held: bool,
    shared: Option<SharedNeeds>,
    heads: SmallVec<[usize; 1]>,
    affinities: SmallVec<[Arc<Affinity>; 1]>,
    reports: Vec<Arc<Attribute>>,
}

impl Wanted {
    /// Adds what one plugin needs; `previous` lends its sessions.
    fn add(&mut self, part: &Part, previous: Option<&Pipeline>) -> Result<(), PipelineError> {
        let needs = &part.instance.needs;
        let differ = self.blocks.zip(needs.blocks).is_some_and(|(a, b)| a != b)
            || self.shared.zip(needs.shared).is_some_and(|(a, b)| a != b);
        if differ {
            return Err(PipelineError::BlocksDiffer(Arc::clone(&part.name)));
        }
        self.blocks = self.blocks.or(needs.blocks);
        self.shared = self.shared.or(needs.shared);
        self.tokens |= needs.tokens || needs.held || needs.shared.is_some();
        self.held |= needs.held;
        self.heads.extend(needs.head_bytes.filter(|bytes| !self.heads.contains(bytes)));
        if let Some(binding) = &needs.session
            && !self.affinities.iter().any(|affinity| affinity.binding == **binding)
        {
            let is_cookie = |binding: &Binding| matches!(binding, Binding::Token(Carrier::Cookie(_)));
            if is_cookie(binding) && self.affinities.iter().any(|affinity| is_cookie(&affinity.binding)) {
                return Err(PipelineError::SecondCookie(Arc::clone(&part.name)));
            }
            let mut before = previous.into_iter().flat_map(|p| &p.affinities);
            let kept = before.find(|affinity| affinity.binding == **binding);
            let affinity = kept.map_or_else(|| Arc::new(Affinity::new((**binding).clone())), Arc::clone);
            self.affinities.push(affinity);
        }
        self.reports.extend(part.instance.reports.iter().flatten().cloned());
        Ok(())
    }
}

impl Draft {
    fn profile(self, wanted: &mut Wanted, previous: Option<&Pipeline>) -> Result<Profile, PipelineError> {
        let mut filters = crate::plugins::standing_filters(&self.parts);
        // A session that is bound to an endpoint which cannot serve moves: that it cannot must be known before.
        let mut session_filters = Vec::new();
        let mut scorers = Vec::new();
        let mut picker = None;
        for part in self.parts {
            wanted.add(&part, previous)?;
            let binds = part.instance.needs.session.is_some();
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
            if let Some(found) = part.instance.picker {
                if picker.is_some() {
                    return Err(PipelineError::SecondPicker(part.name));
                }
                picker = Some(NamedPicker { name: part.name, picker: found });
            }
        }
        filters.append(&mut session_filters);
        let picker = picker.unwrap_or_else(crate::plugins::default_picker);
        Ok(Profile { name: self.name, filters, scorers, picker })
    }
}
