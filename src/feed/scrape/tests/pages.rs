//! Pages in, signals and health out, without a network.

use std::io::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use rstest::rstest;

use super::{Seen, restricted};
use crate::feed::scrape::Combine;
use crate::feed::scrape::adapters::parse_models;
use crate::state::SignalKind;
use crate::state::health::State;

const IDLE: &str = include_str!("../../../../tests/data/vllm/metrics-idle.txt");
const BUSY: &str = include_str!("../../../../tests/data/vllm/metrics-busy.txt");
const AFTER: &str = include_str!("../../../../tests/data/vllm/metrics-after.txt");
const TWO_RANKS: &str = include_str!("../../../../tests/data/vllm/metrics-two-ranks.txt");
const MODELS: &str = include_str!("../../../../tests/data/vllm/metrics-models.txt");

#[test]
fn captured_pages_give_every_signal_filtered_or_not() {
    for filtered in [true, false] {
        let mut seen = Seen::new();
        let path = if filtered { seen.observer.path() } else { "/metrics" };
        seen.own = 5;
        assert!(!seen.page(restricted(IDLE, path)));
        assert_eq!(seen.value(SignalKind::TimeToFirstToken), None, "no sample yet");
        assert!(!seen.page(restricted(BUSY, path)));
        let expected = [
            (SignalKind::Running, 8.0),
            (SignalKind::Waiting, 16.0),
            (SignalKind::Foreign, 19.0),
            (SignalKind::KvUsage, 0.262_230_919_765_166_3),
            (SignalKind::TimeToFirstToken, 19.007_222_414_016_724 / 32.0),
            (SignalKind::TimePerOutputToken, 16.180_445_425_998_87 / 622.0),
            (SignalKind::BlockSize, 32.0),
            (SignalKind::Blocks, 512.0),
            (SignalKind::Asleep, 0.0),
            (SignalKind::TokensDone, 9624.0 + 654.0),
            (SignalKind::ProcessStart, 1_795_977_445.72),
            (SignalKind::MaxLora, 2.0),
        ];
        assert_eq!(expected.len(), SignalKind::ALL.len());
        for (kind, value) in expected {
            let (seen, age) = seen.aged(kind).unwrap();
            assert!((seen - value).abs() < 1e-9, "{kind:?}: {seen} for {value}");
            assert_eq!(age, 0, "{kind:?}");
        }
        assert_eq!(seen.running_adapters(), Some(vec!["lora2".to_owned(), "lora1".to_owned()]));
        let status = seen.observer.status();
        assert_eq!((status.dialect, status.filtered), (Some("vLLM"), true));
        assert_eq!(status.missing, [""; 0]);
        assert!(status.names.contains(&("kv_usage", "vllm:kv_cache_usage_perc")));

        assert!(!seen.page(restricted(AFTER, path)));
        let ttft = (126.402_511_358_261_11 - 19.007_222_414_016_724) / 42.0;
        assert!((seen.value(SignalKind::TimeToFirstToken).unwrap() - ttft).abs() < 1e-9);
        assert_eq!(seen.running_adapters(), Some(vec![]));
        assert_eq!(
            seen.value(SignalKind::Foreign),
            Some(0.0),
            "own bookings that the engine does not see yet"
        );
        assert_eq!(seen.endpoint.health.state(), State::Up);
    }
}

#[test]
fn two_ranks_are_one_endpoint() {
    let mut seen = Seen::new();
    assert!(!seen.page(TWO_RANKS));
    let [tokens, blocks, size, start] = seen.values([
        SignalKind::TokensDone,
        SignalKind::Blocks,
        SignalKind::BlockSize,
        SignalKind::ProcessStart,
    ]);
    assert_eq!((tokens, blocks, size, start), (Some(369.0), Some(1024.0), Some(32.0), None));
    assert_eq!(seen.running_adapters(), Some(vec![]), "no requests, no adapters at work");
}

#[test]
fn models_are_base_names_and_adapters() {
    let served = parse_models(MODELS.as_bytes()).unwrap().served;
    assert_eq!(served, ["tiny", "lora1", "lora2"].map(Box::from));
}

const KV_NEW: &str =
    "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.90\n";
const KV_OLD: &str =
    "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.10\n";

#[rstest]
#[case::p0(KV_NEW.to_owned(), Some(0.90))]
#[case::p1(KV_OLD.to_owned(), Some(0.10))]
#[case::p2(format!("{KV_OLD}{KV_NEW}"), Some(0.90))]
#[case::p2_reversed(format!("{KV_NEW}{KV_OLD}"), Some(0.90))]
#[case::p3("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n".to_owned(), None)]
fn the_newest_name_wins_and_a_missing_one_is_unknown(#[case] page: String, #[case] usage: Option<f64>) {
    let mut seen = Seen::new();
    seen.page(page);
    assert_eq!(seen.value(SignalKind::KvUsage), usage);
    assert_eq!(seen.observer.status().missing.contains(&"kv_usage"), usage.is_none());
}

#[rstest]
#[case::oldest("time_per_output_token_seconds", None, 0.5)]
#[case::newest("inter_token_latency_seconds", None, 0.5)]
#[case::both("time_per_output_token_seconds", Some("inter_token_latency_seconds"), 0.25)]
#[case::middle("time_per_output_token_seconds", Some("request_time_per_output_token_seconds"), 0.25)]
fn names_of_time_per_token(#[case] first: &str, #[case] second: Option<&str>, #[case] mean: f64) {
    let lines = |name: &str, count: u8| format!("vllm:{name}_sum 5\nvllm:{name}_count {count}\n");
    let page = lines(first, 10) + &second.map(|name| lines(name, 20)).unwrap_or_default();
    let mut seen = Seen::new();
    seen.page(page);
    assert_eq!(seen.value(SignalKind::TimePerOutputToken), Some(mean));
}

fn ranks(sum_of_1: u32, count_of_1: u32) -> String {
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} 2.0\n\
         vllm:num_requests_running{{engine=\"1\",model_name=\"m\"}} 3.0\n\
         # TYPE vllm:num_requests_waiting gauge\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} 7.0\n\
         vllm:num_requests_waiting{{engine=\"1\",model_name=\"m\"}} 0.0\n\
         # TYPE vllm:kv_cache_usage_perc gauge\n\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} 0.95\n\
         vllm:kv_cache_usage_perc{{engine=\"1\",model_name=\"m\"}} 0.05\n\
         # TYPE vllm:time_to_first_token_seconds histogram\n\
         vllm:time_to_first_token_seconds_bucket{{engine=\"0\",le=\"+Inf\",model_name=\"m\"}} 10\n\
         vllm:time_to_first_token_seconds_sum{{engine=\"0\",model_name=\"m\"}} 5\n\
         vllm:time_to_first_token_seconds_count{{engine=\"0\",model_name=\"m\"}} 10\n\
         vllm:time_to_first_token_seconds_bucket{{engine=\"1\",le=\"+Inf\",model_name=\"m\"}} {count_of_1}\n\
         vllm:time_to_first_token_seconds_sum{{engine=\"1\",model_name=\"m\"}} {sum_of_1}\n\
         vllm:time_to_first_token_seconds_count{{engine=\"1\",model_name=\"m\"}} {count_of_1}\n"
    )
}

#[rstest]
#[case(Combine::Max, 0.95)]
#[case(Combine::Mean, 0.5)]
fn series_of_ranks_are_put_together(#[case] rule: Combine, #[case] usage: f64) {
    let mut seen = Seen::with(rule);
    seen.page(ranks(3, 30));
    let kinds = [SignalKind::Running, SignalKind::Waiting, SignalKind::KvUsage, SignalKind::TimeToFirstToken];
    assert_eq!(seen.values(kinds), [Some(5.0), Some(7.0), Some(usage), Some(0.2)]);
    seen.page(ranks(1, 2));
    assert_eq!(seen.value(SignalKind::TimeToFirstToken), Some(0.5), "rank 1 restarted");
    seen.page(ranks(1, 2));
    assert_eq!(
        seen.aged(SignalKind::TimeToFirstToken),
        Some((0.5, 1)),
        "nothing new does not make it younger"
    );
    assert_eq!(seen.aged(SignalKind::Running), Some((5.0, 0)));
}

#[rstest]
#[case::p0("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting +Inf\n")]
#[case::p2("")]
#[case::p3("<!doctype html>\n<html><body>vllm:num_requests_running 9</body></html>\n")]
#[case::binary("\u{0}\u{1}\n\n\n{}{}{}")]
fn what_is_not_a_number_is_unknown_and_keeps_the_last(#[case] page: &str) {
    let mut seen = Seen::new();
    seen.page(page);
    assert!(SignalKind::ALL.iter().all(|&kind| seen.value(kind).is_none()));
    seen.page("vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\nvllm:num_requests_running 1\n");
    seen.page(page);
    seen.page(page);
    assert_eq!(seen.aged(SignalKind::KvUsage), Some((0.5, 2)), "older, but not forgotten");
    assert_eq!(seen.aged(SignalKind::Foreign), Some((4.0, 2)));
}

#[test]
fn good_lines_count_beside_garbage() {
    let mut seen = Seen::new();
    seen.page("vllm:num_requests_waiting 3\ngarbage line here\nvllm:num_requests_running 1\n");
    assert_eq!(seen.values([SignalKind::Waiting, SignalKind::Running]), [Some(3.0), Some(1.0)]);
}

#[test]
fn a_cut_page_counts_up_to_its_last_whole_line_and_proves_no_restart() {
    let mut seen = Seen::new();
    seen.page(BUSY);
    let cut = BUSY.find("vllm:generation_tokens_total{").unwrap() + "vllm:generation_tokens_total{".len();
    assert!(!seen.cut_page(&BUSY[..cut], false));
    assert!(!seen.cut_page("vllm:num_requests_running 12\nvllm:num_requests_waiting 1", false));
    assert_eq!(seen.values([SignalKind::Running, SignalKind::Waiting]), [Some(12.0), Some(16.0)]);
    assert!(
        !seen.cut_page("vllm:prompt_tokens_total{engine=\"0\"} 1\n", false),
        "the other rank may be missing"
    );
    assert!(seen.page("vllm:prompt_tokens_total{engine=\"0\"} 1\n"));
}

#[test]
fn an_empty_filtered_page_leads_to_the_full_one_until_the_engine_restarts() {
    let mut seen = Seen::new();
    let filtered = seen.observer.path();
    assert!(filtered.starts_with("/metrics?name"));
    seen.page("");
    assert_eq!(seen.observer.path(), "/metrics");
    seen.page(TWO_RANKS);
    assert_eq!((seen.observer.path(), seen.observer.status().filtered), ("/metrics", false));
    seen.page("");
    assert_eq!(seen.observer.path(), filtered, "nothing on the full page either: worth another try");
    seen.page("");
    seen.page(TWO_RANKS);
    assert_eq!(seen.observer.path(), "/metrics");
    assert!(seen.page(TWO_RANKS.replace("} 122.0", "} 12.0")));
    assert_eq!(seen.observer.path(), filtered);
}

#[test]
fn a_query_that_is_refused_is_not_repeated_at_once() {
    let mut seen = Seen::new();
    seen.observer.answered(&seen.endpoint, 500);
    assert_ne!(seen.observer.path(), "/metrics", "an error of the server says nothing of the query");
    seen.observer.answered(&seen.endpoint, 400);
    assert_eq!((seen.observer.path(), seen.observer.status().filtered), ("/metrics", false));
}

const SGLANG: &str = r#"
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 5
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 2
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="2",tp_rank="0"} 3
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4
sglang:token_usage{model_name="m"} 0.25
sglang:page_size{model_name="m"} 64
sglang:num_pages{model_name="m"} 1000
sglang:time_to_first_token_seconds_sum{model_name="m"} 3
sglang:time_to_first_token_seconds_count{model_name="m"} 6
sglang:inter_token_latency_seconds_sum{model_name="m"} 1
sglang:inter_token_latency_seconds_count{model_name="m"} 100
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 100
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 20
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 3
"#;
const TGI: &str = "tgi_queue_size 3\ntgi_batch_current_size 7\n\
    tgi_request_mean_time_per_token_duration_sum 2\ntgi_request_mean_time_per_token_duration_count 40\n";

#[test]
fn the_page_decides_the_dialect_whatever_the_endpoint_is_said_to_run() {
    let mut seen = Seen::new();
    seen.page("");
    seen.page(SGLANG);
    let status = seen.observer.status().clone();
    assert_eq!((status.dialect, status.missing, status.filtered), (Some("SGLang"), vec![], true));
    assert!(seen.observer.path().contains("sglang:num_running_reqs"), "its filter is worth a try");
    let kinds = [SignalKind::Running, SignalKind::Waiting, SignalKind::KvUsage, SignalKind::TimeToFirstToken];
    assert_eq!(seen.values(kinds), [Some(5.0), Some(4.0), Some(0.25), Some(0.5)]);
    let kinds =
        [SignalKind::BlockSize, SignalKind::Blocks, SignalKind::TokensDone, SignalKind::TimePerOutputToken];
    assert_eq!(seen.values(kinds), [Some(64.0), Some(1000.0), Some(123.0), Some(0.01)]);
    seen.page("");
    seen.page(SGLANG);
    assert_eq!(seen.observer.path(), "/metrics", "and given up once it failed");

    let mut seen = Seen::new();
    seen.page(TGI);
    assert_eq!(seen.observer.status().dialect, Some("TGI"));
    let kinds =
        [SignalKind::Running, SignalKind::Waiting, SignalKind::Foreign, SignalKind::TimePerOutputToken];
    assert_eq!(seen.values(kinds), [Some(7.0), Some(3.0), Some(10.0), Some(0.05)]);
    assert_eq!(seen.observer.status().missing, [""; 0]);
}

/// What `work` logs at `warn` and above, line by line.
fn warnings(work: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, work);
    let bytes = lines.0.lock().clone();
    String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_missing_metric_is_warned_of_once() {
    let mut seen = Seen::new();
    let lines = warnings(|| {
        for _ in 0..3 {
            seen.page("vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n");
        }
    });
    for metric in ["kv_usage", "time_to_first_token", "time_per_output_token", "tokens_done", "block_size"] {
        let of_metric = lines.iter().filter(|line| line.contains(&format!("metric=\"{metric}\"")));
        assert_eq!(of_metric.count(), 1, "{metric} in {lines:#?}");
    }
    assert_eq!(lines.len(), 5, "{lines:#?}");
    assert!(lines[0].contains("endpoint=default/a") && lines[0].contains("10.0.0.1:8000"), "{}", lines[0]);
}

#[test]
fn a_page_without_any_metric_is_warned_of_once_and_not_before_all_was_asked_for() {
    let mut seen = Seen::new();
    assert_eq!(warnings(|| assert!(!seen.page(""))), [""; 0], "the full page may have some");
    let lines = warnings(|| {
        for _ in 0..4 {
            seen.page("");
        }
    });
    assert_eq!(lines.len(), 1, "{lines:#?}");
}
