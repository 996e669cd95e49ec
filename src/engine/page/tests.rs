//! The page against the captured one, and its filter against prometheus_client's rules.

use super::*;

const CAPTURE: &str = include_str!("../../../tests/data/vllm/metrics_idle.txt");

/// The configuration of the captured engine.
fn page(padding: usize) -> Page {
    Page::new(&PageConfig {
        model: "tiny",
        blocks: 512,
        block_size: 32,
        max_model_len: 4096,
        max_lora: 2,
        started: 1_795_977_445.72,
        padding,
        nixl: false,
    })
}

/// Lines of families that the simulator has, without the values of `_created` and of the process.
fn comparable(text: &str) -> Vec<String> {
    let foreign = ["vllm:estimated_", "vllm:mm_cache_", "vllm:lora_requests_info"];
    text.lines()
        .filter(|line| line.contains("vllm:") && !line.starts_with("# HELP"))
        .filter(|line| !foreign.iter().any(|prefix| line.contains(prefix)))
        .map(|line| match line.split_once("_created{") {
            Some(_) => line.rsplit_once(' ').map_or(line, |(series, _)| series).to_owned(),
            None => line.to_owned(),
        })
        .collect()
}

#[test]
fn an_idle_page_is_the_captured_one_line_by_line() {
    let ours = page(0).render(&Metrics::default(), None);
    assert_eq!(comparable(&ours), comparable(CAPTURE));
    assert!(ours.contains("process_start_time_seconds 1.79597744572e+09\n"));
}

#[rstest::rstest]
#[case(0.0, "0.0")]
#[case(1.0, "1.0")]
#[case(0.001, "0.001")]
#[case(999_999.0, "999999.0")]
#[case(1_000_000.0, "1e+06")]
#[case(1_795_977_445.72, "1.79597744572e+09")]
#[case(0.541_415_766_999_989_5, "0.5414157669999895")]
fn numbers_are_written_as_the_python_client_does(#[case] value: f64, #[case] text: &str) {
    let mut out = String::new();
    number(&mut out, value);
    assert_eq!(out, text);
}

fn samples(names: &[&str]) -> Vec<String> {
    let mut metrics = Metrics::default();
    metrics.time_to_first_token.observe(0.03);
    metrics.note_adapters("a,b", "", 1_795_977_600.5);
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let text = page(60_000).render(&metrics, Some(&names));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_filter_names_samples_and_keeps_the_header_of_their_family() {
    let header = [
        "# HELP vllm:time_to_first_token_seconds Time to first token.",
        "# TYPE vllm:time_to_first_token_seconds histogram",
    ];
    let sum = r#"vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.03"#;
    let count = r#"vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0"#;
    assert_eq!(samples(&["vllm:time_to_first_token_seconds_sum"]), [header[0], header[1], sum]);
    assert_eq!(
        samples(&["vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"]),
        [header[0], header[1], count, sum]
    );
    assert_eq!(samples(&["vllm:time_to_first_token_seconds_bucket"]).len(), 2 + 23);
}

#[rstest::rstest]
#[case("vllm:time_to_first_token_seconds")]
#[case("vllm:prompt_tokens")]
#[case("nothing")]
fn a_base_name_is_no_sample_name(#[case] name: &str) {
    assert_eq!(samples(&[name]), [""; 0]);
}

#[test]
fn adapters_and_the_configuration_can_be_asked_for() {
    let lines = samples(&["vllm:lora_requests_info", "vllm:cache_config_info"]);
    assert_eq!(
        lines[2],
        r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7959776005e+09"#
    );
    assert!(lines[5].contains(r#"num_gpu_blocks="512""#));
    assert_eq!(lines.len(), 6);
}

#[test]
fn padding_fills_the_unfiltered_page_only() {
    let full = page(60_000).render(&Metrics::default(), None);
    assert!((60_000..61_000).contains(&full.len()), "{}", full.len());
    assert!(samples(&["vllm:num_requests_running"]).len() == 3);
}

#[test]
fn label_values_are_escaped() {
    assert_eq!(prefix("m", &[("b", "x\"y\\z"), ("a", "1")]), "m{a=\"1\",b=\"x\\\"y\\\\z\"} ");
}
