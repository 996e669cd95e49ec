//! The prompt in every form that the profile asks for: text in blocks, token ids in blocks, hashes of its head.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::Decider;
use crate::config::TokenizerSettings;
use crate::decision::Record;
use crate::metrics::Stage;
use crate::prompt::{Blocks, Namespace, Prepared, Tokenizers, Tokens, tokenize};
use crate::request::LlmRequest;
use crate::schedule::Pipeline;
use crate::snapshot::Routed;
use crate::state::endpoint::EngineKind;
use crate::state::health::State;
use crate::state::{Pool, TokenizerSource};

/// How prompts become token ids.
#[derive(Debug, Default)]
pub struct Tokenizing {
    /// The service; without it only ids that clients send are known.
    pub service: Option<Tokenizers>,
    /// Where models' tokenizers are, by the configuration.
    pub sources: ArcSwap<TokenizerSettings>,
    /// How long a pick waits for ids.
    pub wait: Wait,
}

/// Bounds on the time that a pick waits for token ids.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// At least.
    pub least: Duration,
    /// At most.
    pub most: Duration,
}

/// Part of a prompt's own prefill that a wait for its ids may cost: what is known of caches saves more than that, and a
/// fixed time would shut out the long prompts that have most to gain.
const PART_OF_PREFILL: f64 = 0.05;

/// Tokens in a block where no engine of the pool has said so yet: vLLM's default.
const USUAL_BLOCK: usize = 16;

impl Default for Wait {
    fn default() -> Self {
        Self { least: Duration::from_millis(5), most: Duration::from_millis(50) }
    }
}

impl Wait {
    /// The wait for a prompt whose prefill takes `prefill`.
    fn of(self, prefill: Duration) -> Duration {
        prefill.mul_f64(PART_OF_PREFILL).clamp(self.least, self.most.max(self.least))
    }
}

impl Tokenizing {
    /// Takes over where tokenizers are, and loads those of `pools`.
    pub fn follow<'a>(&self, pools: impl Iterator<Item = &'a Pool>) {
        let Some(service) = &self.service else { return };
        let configured = self.sources.load();
        let annotated = pools.filter_map(|pool| pool.tokenizer.as_ref());
        service.follow(configured.sources().chain(annotated));
    }
}

impl Decider {
    /// Cuts the prompt in every way that the profile asks for; waits for its token ids as long as they are worth it. A limit
    /// on input tokens asks for them too, to count them.
    pub(super) async fn prepare(
        &self,
        record: &mut Record,
        pipeline: &Pipeline,
        routed: &Routed,
        request: &LlmRequest,
        path: &str,
        body: &[u8],
    ) -> Prepared {
        let pool = &*routed.pool;
        let began = Instant::now();
        let salt = request.cache_salt.as_deref();
        let engine_block = pool.engine_block();
        let tokens = request.prompt.estimated_tokens();
        let mut prompt = Prepared { tokens, engine_block, ..Prepared::default() };
        let render = |sink: &mut dyn FnMut(&[u8])| request.prompt.render(body, sink);
        if let Some(text) = &pipeline.text {
            prompt.text = Blocks::of_text(text.needs, &routed.target_model, salt, render);
        }
        for &bytes in &pipeline.heads {
            prompt.add_head(bytes, render);
        }
        let counts = routed.limit.as_ref().is_some_and(|limit| limit.rates.input.is_some());
        let ids = if pipeline.tokens || counts { self.ids(routed, request, path, body).await } else { None };
        if let Some(ids) = &ids {
            let further = tokens - request.prompt.estimated_tokens_of_first().min(tokens);
            prompt.tokens = ids.len() as u64 + further;
            prompt.counted = true;
        }
        if let Some(ids) = ids.filter(|_| pipeline.tokens) {
            let model = &*routed.target_model;
            let adapter = pool.is_adapter(model).then_some(model);
            let block = engine_block.unwrap_or(USUAL_BLOCK);
            prompt.ids = Blocks::of_tokens(&ids, block, Namespace { adapter, salt });
            prompt.token_ids = Some(ids);
            self.ask_shared(&mut prompt, pipeline, routed, request).await;
        }
        record.stages.prompt = began.elapsed();
        self.metrics.stage(Stage::Prompt, record.stages.prompt);
        prompt
    }

    /// The prompt's token ids, if they can be had in time.
    async fn ids(&self, routed: &Routed, request: &LlmRequest, path: &str, body: &[u8]) -> Option<Tokens> {
        let pool = &*routed.pool;
        let Some(service) = &self.tokenizing.service else {
            return request.prompt.token_ids().map(|ids| Tokens::new(ids, crate::prompt::Origin::Body));
        };
        let settings = self.tokenizing.sources.load_full();
        let source = settings.resolve(pool.tokenizer.as_ref(), &routed.target_model);
        let engine = matches!(source, Some(TokenizerSource::Engine)).then(|| an_engine(pool)).flatten();
        let prefill = pool.memory.learned.expected_prefill(request.prompt.estimated_tokens());
        let ask = tokenize::Ask {
            source,
            pool: &pool.label,
            request,
            path,
            body,
            model: &routed.target_model,
            engine,
            budget: self.tokenizing.wait.of(prefill),
        };
        service.tokens(ask).await.ok()
    }
}

/// The endpoint that tokenizes for its pool: the one with the least to do of those that are up.
fn an_engine(pool: &Pool) -> Option<(std::net::SocketAddr, EngineKind)> {
    pool.members
        .iter()
        .map(|member: &Arc<_>| &member.endpoint)
        .filter(|endpoint| endpoint.health.state() == State::Up)
        .min_by_key(|endpoint| endpoint.booked.read().0)
        .map(|endpoint| (endpoint.address, endpoint.engine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_may_wait_longer_within_bounds() {
        let wait = Wait::default();
        let of = |millis| wait.of(Duration::from_millis(millis)).as_millis();
        assert_eq!([of(0), of(99), of(400), of(60_000)], [5, 5, 20, 50]);
    }
}
