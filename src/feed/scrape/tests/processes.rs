//! What successive pages tell of the engine's process: sleep, standstill, restart.

use rstest::rstest;

use super::Seen;
use crate::feed::scrape::Combine;
use crate::feed::scrape::observer::Observer;
use crate::state::SignalKind;
use crate::state::health::State;
use crate::state::signals::Millis;

#[rstest]
#[case::awake("awake", 1, "weights_offloaded", 0, State::Up)]
#[case::offloaded("awake", 0, "weights_offloaded", 1, State::Asleep)]
#[case::discarded("awake", 1, "discard_all", 1, State::Asleep)]
#[case::only_awake("awake", 0, "other", 0, State::Asleep)]
fn sleep_is_seen_in_any_of_its_forms(
    #[case] first: &str,
    #[case] a: u8,
    #[case] second: &str,
    #[case] b: u8,
    #[case] state: State,
) {
    let line =
        |state, value| format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{state}\"}} {value}\n");
    let mut seen = Seen::new();
    seen.page(line(first, a) + &line(second, b));
    assert_eq!(seen.endpoint.health.state(), state);
    assert_eq!(seen.value(SignalKind::Asleep), Some(f64::from(u8::from(state == State::Asleep))));
    seen.page("vllm:num_requests_running 1\n");
    assert_eq!(seen.endpoint.health.state(), state, "silence does not wake it");
    seen.page(line("awake", 1));
    assert_eq!(seen.endpoint.health.state(), State::Up);
}

fn tokens(prompt: u32, output: u32) -> String {
    format!("vllm:prompt_tokens_total 1{prompt}\nvllm:generation_tokens_total {output}\n")
}

#[test]
fn ten_flat_seconds_with_requests_open_are_a_standstill() {
    let mut seen = Seen::new();
    for second in 0..30 {
        seen.page(tokens(0, 0));
        assert!(!seen.endpoint.health.is_wedged(), "idle for {second} s");
    }
    seen.own = 1;
    for _ in 0..9 {
        seen.page(tokens(0, 0));
        assert!(!seen.endpoint.health.is_wedged());
    }
    seen.page(tokens(0, 0));
    assert!(seen.endpoint.health.is_wedged());
    seen.page(tokens(0, 1));
    assert!(!seen.endpoint.health.is_wedged(), "it moves");
    for _ in 0..10 {
        seen.page(tokens(0, 1));
    }
    assert!(seen.endpoint.health.is_wedged());
    seen.own = 0;
    seen.page(tokens(0, 1));
    assert!(!seen.endpoint.health.is_wedged(), "nobody waits");
}

#[rstest]
#[case::another_start("process_start_time_seconds 2\nvllm:num_requests_waiting 1\n")]
#[case::prompt_tokens_fell(
    "process_start_time_seconds 1\nvllm:prompt_tokens_total 9\nvllm:generation_tokens_total 99\n"
)]
#[case::output_tokens_fell(
    "process_start_time_seconds 1\nvllm:prompt_tokens_total 99\nvllm:generation_tokens_total 9\n"
)]
fn a_restart_forgets_the_old_process(#[case] new: &str) {
    let mut seen = Seen::new();
    let old = "process_start_time_seconds 1\nvllm:prompt_tokens_total 10\nvllm:generation_tokens_total 10\n\
        vllm:kv_cache_usage_perc 0.5\nvllm:time_to_first_token_seconds_sum 8\nvllm:time_to_first_token_seconds_count 4\n\
        vllm:engine_sleep_state{sleep_state=\"awake\"} 0\n\
        vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"x\",waiting_lora_adapters=\"\"} 1.7e9\n";
    assert!(!seen.page(old));
    assert!(!seen.page(old));
    assert_eq!(seen.running_adapters(), Some(vec!["x".to_owned()]));
    for _ in 0..3 {
        seen.endpoint.health.answered(500, Millis::now());
    }
    assert!(seen.page(new));
    assert_eq!(seen.endpoint.health.state(), State::Up, "neither draining nor asleep");
    assert_eq!(seen.value(SignalKind::KvUsage), None);
    assert_eq!(seen.running_adapters(), None);
    assert!(!seen.page(new), "once");
    seen.page(format!(
        "{new}vllm:time_to_first_token_seconds_sum 9\nvllm:time_to_first_token_seconds_count 9\n"
    ));
    assert_eq!(seen.value(SignalKind::TimeToFirstToken), Some(1.0), "not the difference to the old process");
}

#[test]
fn a_start_time_seen_before_an_absence_still_counts() {
    let mut seen = Seen::new();
    seen.page("process_start_time_seconds 1\n");
    seen.observer = Observer::new(&seen.endpoint, Combine::Max);
    assert!(seen.page("process_start_time_seconds 2\n"));
}
