//! Whether the tokens of a request may be spent.

use super::Decider;
use crate::admission::limits::{Both, Limiting};
use crate::decision::Record;
use crate::prompt::Prepared;
use crate::refusal::Refusal;
use crate::request::{Api, LlmRequest};
use crate::snapshot::Routed;

impl Decider {
    /// Charges the request by the limit of its route. What has no output is not asked for any.
    pub(super) async fn limit(
        &self,
        record: &mut Record,
        routed: &Routed,
        request: &LlmRequest,
        prompt: &Prepared,
    ) -> Result<Limiting, Refusal> {
        let Some(limit) = &routed.limit else { return Ok(Limiting::Unlimited) };
        let generates = !matches!(request.api, Api::Embeddings | Api::Tokenize);
        let Some(limiter) = &self.limiter else {
            return Ok(Limiting::ByEnvoy { limit: limit.clone(), generates });
        };
        record.prompt_tokens = prompt.tokens;
        let output = generates.then(|| limiter.output(request.max_tokens, request.generated()));
        let asks = Both { input: Some(prompt.tokens), output };
        let charged = limiter.charge(limit, &record.identity, asks).await;
        charged.map(|charge| Limiting::Charged(Box::new(charge))).map_err(|denied| denied.refusal(limit))
    }
}
