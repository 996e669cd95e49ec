//! Asks the index that others write who owns a prompt's blocks.

use std::sync::Arc;

use super::Decider;
use crate::index::shared::{Chunks, Question, SharedOwners};
use crate::prompt::Prepared;
use crate::request::LlmRequest;
use crate::schedule::Pipeline;
use crate::snapshot::Routed;

/// Bytes of the longest model name that is looked up: it is in every key, and a client may have chosen it.
const LONGEST_NAME: usize = 512;

impl Decider {
    /// Fills `prompt.shared`, if its token ids are known, the profile wants that and the index answers in time. Names of
    /// blocks say nothing of a cache salt, so a salted prompt would be promised what it cannot use: it is not asked for.
    pub(super) async fn ask_shared(
        &self,
        prompt: &mut Prepared,
        pipeline: &Pipeline,
        routed: &Routed,
        request: &LlmRequest,
    ) {
        let (Some(index), Some(needs)) = (&self.shared, pipeline.shared) else { return };
        let Some(ids) = prompt.token_ids.clone().filter(|ids| !ids.is_empty()) else { return };
        let names_fit = |name: &str| name.len() <= LONGEST_NAME;
        if request.cache_salt.is_some() || !names_fit(&routed.target_model) {
            return;
        }
        if let Some(engine) = prompt.engine_block.filter(|engine| *engine != needs.block_tokens) {
            if self.scheduler.note_mismatch() {
                tracing::warn!(
                    pool = &*routed.pool.label,
                    engine,
                    configured = needs.block_tokens,
                    "engines have blocks of another size than kvcache-aware asks for: nothing would be found, so it is not \
                     asked; set blockSizeToHash to the engines' block size"
                );
            }
            return;
        }
        let chunks = Chunks::of(&ids, needs.block_tokens, needs.max_blocks);
        let model = Arc::clone(&routed.target_model);
        // Kthena's engines write under the name they were told, which a client may use and a route may replace.
        let fallback =
            request.model.as_deref().filter(|asked| **asked != *model && names_fit(asked)).map(Arc::from);
        let question = Question { model, fallback, hashes: chunks.hashes.clone(), deadline: needs.deadline };
        let answer = index.owners(question).await;
        self.scheduler.note_shared(answer.is_some());
        let Some(answer) = answer else { return };
        let endpoints = || routed.pool.members.iter().map(|member| &*member.endpoint);
        let owners = SharedOwners::of(&chunks, &answer, endpoints());
        endpoints()
            .filter(|endpoint| owners.depth(endpoint.slot) > 0)
            .for_each(|owner| owner.cache.note_shared());
        prompt.shared = Some(owners);
    }
}
