//! What the engine counts, under the names, labels and buckets of vLLM 0.32.

/// A Prometheus histogram with vLLM's bounds.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Upper bounds of the buckets, `+Inf` excluded.
    pub bounds: &'static [f64],
    /// Observations per bucket, not cumulated; the last one is `+Inf`.
    pub buckets: Vec<u64>,
    /// Sum of all observations.
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, buckets: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Adds one observation.
    pub fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.buckets[bucket] += 1;
        self.sum += value;
    }
}

const TOKENS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0];
const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// Everything that `/metrics` reports. Times are seconds.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "each field is the vLLM metric of the same name")]
pub struct Metrics {
    pub num_requests_running: u64,
    pub waiting_capacity: u64,
    pub waiting_deferred: u64,
    pub kv_cache_usage: f64,
    pub sleep_level: u8,
    pub prefix_cache_queries: u64,
    pub prefix_cache_hits: u64,
    pub external_cache_queries: u64,
    pub external_cache_hits: u64,
    pub num_preemptions: u64,
    pub prompt_tokens: u64,
    /// Found in this engine's own cache.
    pub prompt_tokens_cached: u64,
    /// Computed by another engine.
    pub prompt_tokens_transferred: u64,
    pub generation_tokens: u64,
    pub finished_stop: u64,
    pub finished_length: u64,
    pub rejected_requests: u64,
    pub transfers_failed: u64,
    pub transfers_expired: u64,
    pub request_prompt_tokens: Histogram,
    pub request_generation_tokens: Histogram,
    pub iteration_tokens: Histogram,
    pub request_max_num_generation_tokens: Histogram,
    pub request_params_n: Histogram,
    pub request_params_max_tokens: Histogram,
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub request_time_per_output_token: Histogram,
    pub e2e_request_latency: Histogram,
    pub request_queue_time: Histogram,
    pub request_inference_time: Histogram,
    pub request_prefill_time: Histogram,
    pub request_decode_time: Histogram,
    pub request_num_preemptions: Histogram,
    pub request_prefill_kv_computed_tokens: Histogram,
    /// (running adapters, waiting adapters, time of the last update): one entry per combination ever seen, as in vLLM.
    pub lora_requests: Vec<(String, String, f64)>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            num_requests_running: 0,
            waiting_capacity: 0,
            waiting_deferred: 0,
            kv_cache_usage: 0.0,
            sleep_level: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            external_cache_queries: 0,
            external_cache_hits: 0,
            num_preemptions: 0,
            prompt_tokens: 0,
            prompt_tokens_cached: 0,
            prompt_tokens_transferred: 0,
            generation_tokens: 0,
            finished_stop: 0,
            finished_length: 0,
            rejected_requests: 0,
            transfers_failed: 0,
            transfers_expired: 0,
            request_prompt_tokens: Histogram::new(TOKENS),
            request_generation_tokens: Histogram::new(TOKENS),
            iteration_tokens: Histogram::new(STEP_TOKENS),
            request_max_num_generation_tokens: Histogram::new(TOKENS),
            request_params_n: Histogram::new(CHOICES),
            request_params_max_tokens: Histogram::new(TOKENS),
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token_latency: Histogram::new(BETWEEN_TOKENS),
            request_time_per_output_token: Histogram::new(BETWEEN_TOKENS),
            e2e_request_latency: Histogram::new(REQUEST),
            request_queue_time: Histogram::new(REQUEST),
            request_inference_time: Histogram::new(REQUEST),
            request_prefill_time: Histogram::new(REQUEST),
            request_decode_time: Histogram::new(REQUEST),
            request_num_preemptions: Histogram::new(PREEMPTIONS),
            request_prefill_kv_computed_tokens: Histogram::new(TOKENS),
            lora_requests: Vec::new(),
        }
    }
}

impl Metrics {
    /// Notes which adapters run and wait at `now` (Unix seconds).
    pub fn note_adapters(&mut self, running: &str, waiting: &str, now: f64) {
        match self.lora_requests.iter_mut().find(|(r, w, _)| r == running && w == waiting) {
            Some((_, _, time)) => *time = now,
            None => self.lora_requests.push((running.to_owned(), waiting.to_owned(), now)),
        }
    }
}

/// Where a family's values come from.
pub(super) enum Source {
    /// One value per value of the extra label, or one.
    Gauge(fn(&Metrics, &mut Vec<f64>)),
    /// The same, with `_total` and `_created`.
    Counter(fn(&Metrics, &mut Vec<f64>)),
    /// Buckets, count and sum.
    Histogram(fn(&Metrics) -> &Histogram),
}

/// One metric family.
pub(super) struct Family {
    /// Name without `_total`.
    pub name: &'static str,
    pub help: &'static str,
    /// The label beside `engine` and `model_name`, with all its values.
    pub label: Option<(&'static str, &'static [&'static str])>,
    pub source: Source,
}

const fn family(name: &'static str, help: &'static str, source: Source) -> Family {
    Family { name, help, label: None, source }
}

const fn labelled(
    name: &'static str,
    help: &'static str,
    label: &'static str,
    values: &'static [&'static str],
    source: Source,
) -> Family {
    Family { name, help, label: Some((label, values)), source }
}

use Source::{Counter, Gauge, Histogram as Buckets};

/// The only family without an `engine` label.
pub(super) const ADMISSION_REJECTIONS: &str = "vllm:admission_rejections";

/// All families with a fixed set of series, in vLLM's order.
pub(super) static FAMILIES: &[Family] = &[
    family(
        "vllm:num_requests_running",
        "Requests in the running batch.",
        Gauge(|m, v| v.push(m.num_requests_running as f64)),
    ),
    family(
        "vllm:num_requests_waiting",
        "Requests that wait to be scheduled.",
        Gauge(|m, v| v.push((m.waiting_capacity + m.waiting_deferred) as f64)),
    ),
    labelled(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests by what they wait for.",
        "reason",
        &["capacity", "deferred"],
        Gauge(|m, v| v.extend([m.waiting_capacity as f64, m.waiting_deferred as f64])),
    ),
    labelled(
        "vllm:engine_sleep_state",
        "1 for the state the engine is in.",
        "sleep_state",
        &["awake", "weights_offloaded", "discard_all"],
        Gauge(|m, v| v.extend((0..3).map(|level| f64::from(u8::from(m.sleep_level == level))))),
    ),
    family(
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks held by live requests, 0 to 1.",
        Gauge(|m, v| v.push(m.kv_cache_usage)),
    ),
    family(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        Counter(|m, v| v.push(m.prefix_cache_queries as f64)),
    ),
    family(
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache.",
        Counter(|m, v| v.push(m.prefix_cache_hits as f64)),
    ),
    family(
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in an external cache.",
        Counter(|m, v| v.push(m.external_cache_queries as f64)),
    ),
    family(
        "vllm:external_prefix_cache_hits",
        "Tokens found in an external cache.",
        Counter(|m, v| v.push(m.external_cache_hits as f64)),
    ),
    family("vllm:num_preemptions", "Preempted requests.", Counter(|m, v| v.push(m.num_preemptions as f64))),
    family(
        "vllm:prompt_tokens",
        "Prompt tokens of prefilled requests.",
        Counter(|m, v| v.push(m.prompt_tokens as f64)),
    ),
    labelled(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        "source",
        &["local_compute", "local_cache_hit", "external_kv_transfer"],
        Counter(|m, v| {
            let (cached, transferred) = (m.prompt_tokens_cached, m.prompt_tokens_transferred);
            let computed = m.prompt_tokens - cached - transferred;
            v.extend([computed as f64, cached as f64, transferred as f64]);
        }),
    ),
    family(
        "vllm:prompt_tokens_cached",
        "Prompt tokens that were cached.",
        Counter(|m, v| v.push((m.prompt_tokens_cached + m.prompt_tokens_transferred) as f64)),
    ),
    labelled(
        "vllm:prompt_tokens_cached_by_source",
        "Cached prompt tokens by the tier that held them.",
        "source",
        &["device", "host", "p2p", "disk", "external_unspecified"],
        Counter(|m, v| {
            v.extend([m.prompt_tokens_cached as f64, 0.0, m.prompt_tokens_transferred as f64, 0.0, 0.0]);
        }),
    ),
    family("vllm:generation_tokens", "Generated tokens.", Counter(|m, v| v.push(m.generation_tokens as f64))),
    labelled(
        "vllm:request_success",
        "Finished requests by the reason of their end.",
        "finished_reason",
        &["stop", "length", "abort", "error", "repetition"],
        Counter(|m, v| v.extend([m.finished_stop as f64, m.finished_length as f64, 0.0, 0.0, 0.0])),
    ),
    labelled(
        ADMISSION_REJECTIONS,
        "Requests refused with 503 because too many were queued.",
        "reason",
        &["max_num_queued_reqs", "max_num_queued_tokens"],
        Counter(|m, v| v.extend([m.rejected_requests as f64, 0.0])),
    ),
    family("vllm:request_prompt_tokens", "Prompt tokens per request.", Buckets(|m| &m.request_prompt_tokens)),
    family(
        "vllm:request_generation_tokens",
        "Generated tokens per request.",
        Buckets(|m| &m.request_generation_tokens),
    ),
    family("vllm:iteration_tokens_total", "Tokens per engine step.", Buckets(|m| &m.iteration_tokens)),
    family(
        "vllm:request_max_num_generation_tokens",
        "Longest answer per request.",
        Buckets(|m| &m.request_max_num_generation_tokens),
    ),
    family("vllm:request_params_n", "The parameter n.", Buckets(|m| &m.request_params_n)),
    family(
        "vllm:request_params_max_tokens",
        "The parameter max_tokens.",
        Buckets(|m| &m.request_params_max_tokens),
    ),
    family("vllm:time_to_first_token_seconds", "Time to first token.", Buckets(|m| &m.time_to_first_token)),
    family("vllm:inter_token_latency_seconds", "Time between tokens.", Buckets(|m| &m.inter_token_latency)),
    family(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request.",
        Buckets(|m| &m.request_time_per_output_token),
    ),
    family(
        "vllm:e2e_request_latency_seconds",
        "Time from arrival to the last token.",
        Buckets(|m| &m.e2e_request_latency),
    ),
    family(
        "vllm:request_queue_time_seconds",
        "Time in the waiting queue.",
        Buckets(|m| &m.request_queue_time),
    ),
    family(
        "vllm:request_inference_time_seconds",
        "Time in the running batch.",
        Buckets(|m| &m.request_inference_time),
    ),
    family(
        "vllm:request_prefill_time_seconds",
        "Time from scheduling to the first token.",
        Buckets(|m| &m.request_prefill_time),
    ),
    family(
        "vllm:request_decode_time_seconds",
        "Time from the first token to the last.",
        Buckets(|m| &m.request_decode_time),
    ),
    family(
        "vllm:request_num_preemptions",
        "Preemptions per request.",
        Buckets(|m| &m.request_num_preemptions),
    ),
    family(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens per request that were computed, not cached.",
        Buckets(|m| &m.request_prefill_kv_computed_tokens),
    ),
];

/// What an engine with NIXL counts besides.
pub(super) static NIXL_FAMILIES: &[Family] = &[
    family(
        "vllm:nixl_num_failed_transfers",
        "Transfers that failed.",
        Counter(|m, v| v.push(m.transfers_failed as f64)),
    ),
    family(
        "vllm:nixl_num_kv_expired_reqs",
        "Prefills whose KV was released unread.",
        Counter(|m, v| v.push(m.transfers_expired as f64)),
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_own_bucket() {
        let mut histogram = Histogram::new(CHOICES);
        for value in [1.0, 1.5, 2.0, 21.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.buckets, [1, 2, 0, 0, 0, 1]);
        assert!((histogram.sum - 25.5).abs() < 1e-9);
    }

    #[test]
    fn every_adapter_combination_keeps_its_series() {
        let mut metrics = Metrics::default();
        metrics.note_adapters("a", "", 1.0);
        metrics.note_adapters("", "", 2.0);
        metrics.note_adapters("a", "", 3.0);
        assert_eq!(
            metrics.lora_requests,
            [("a".into(), String::new(), 3.0), (String::new(), String::new(), 2.0)]
        );
    }
}
