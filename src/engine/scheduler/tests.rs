//! Batching, queueing and caching under a paused clock, where every time is exact.

use std::time::Duration;

use tokio::task::JoinHandle;

use super::*;

struct Bench {
    scheduler: Arc<Scheduler>,
    faults: watch::Sender<Faults>,
    task: JoinHandle<()>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// 10 ms a step, 1 ms a prompt token, nothing per sequence.
fn limits() -> Limits {
    Limits {
        blocks: 100,
        block_size: 4,
        max_running: 8,
        max_queued: None,
        max_batched_tokens: 1000,
        max_lora: 1,
        has_loras: true,
        speed: 1.0,
        timing: Timing {
            prefill_token: Duration::from_millis(1),
            step: Duration::from_millis(10),
            sequence: Duration::ZERO,
        },
        connected: false,
    }
}

impl Bench {
    fn new(limits: Limits) -> Self {
        let scheduler = Arc::new(Scheduler::new(limits, None));
        let faults = watch::Sender::new(Faults::default());
        let task = tokio::spawn(scheduler.clone().run(faults.subscribe()));
        Self { scheduler, faults, task }
    }

    fn submit(&self, work: Work) -> mpsc::UnboundedReceiver<Event> {
        self.scheduler.submit(vec![work]).unwrap()
    }

    fn running_and_waiting(&self) -> (u64, u64) {
        let metrics = self.scheduler.metrics();
        (metrics.num_requests_running, metrics.waiting_capacity + metrics.waiting_deferred)
    }
}

fn work(tokens: std::ops::Range<u32>, max_tokens: u32) -> Work {
    Work {
        tokens: tokens.collect(),
        adapter: "".into(),
        salt: "".into(),
        max_tokens,
        stop_after: None,
        seed: 0,
        choices: 1,
        arrival: None,
        kept: None,
    }
}

async fn finish(receiver: &mut mpsc::UnboundedReceiver<Event>) -> Event {
    let last = async {
        loop {
            let event = receiver.recv().await.unwrap();
            if event.finish.is_some() {
                return event;
            }
        }
    };
    tokio::time::timeout(Duration::from_hours(1), last).await.expect("the sequence never ended")
}

async fn sleep(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_takes_its_prefill_and_one_step_per_further_token() {
    let bench = Bench::new(limits());
    let started = Instant::now();
    let mut events = bench.submit(work(0..20, 3));
    assert_eq!(events.recv().await.unwrap().finish, None);
    assert_eq!(started.elapsed(), Duration::from_millis(10 + 20));
    assert_eq!(finish(&mut events).await.finish, Some(Finish::Length));
    assert_eq!(started.elapsed(), Duration::from_millis(30 + 20));
    let metrics = bench.scheduler.metrics();
    assert!((metrics.time_to_first_token.sum - 0.03).abs() < 1e-9);
    assert!((metrics.inter_token_latency.sum - 0.02).abs() < 1e-9);
    assert!((metrics.e2e_request_latency.sum - 0.05).abs() < 1e-9);
    assert_eq!((metrics.prompt_tokens, metrics.generation_tokens, metrics.finished_length), (20, 3, 1));
}

#[rstest::rstest]
#[case(2.0, None, 10)]
#[case(1.0, Some(3.0), 60)]
#[case(2.0, Some(3.0), 30)]
#[tokio::test(start_paused = true)]
async fn speed_divides_and_the_slow_fault_multiplies(
    #[case] speed: f64,
    #[case] slow: Option<f64>,
    #[case] expected: u64,
) {
    let bench = Bench::new(Limits { speed, ..limits() });
    bench.faults.send_modify(|faults| slow.into_iter().for_each(|factor| faults.set(Fault::Slow(factor))));
    let started = Instant::now();
    finish(&mut bench.submit(work(0..10, 1))).await;
    assert_eq!(started.elapsed(), Duration::from_millis(expected));
}

#[tokio::test(start_paused = true)]
async fn high_speed_is_not_lost_to_the_timer() {
    let bench = Bench::new(Limits { speed: 100.0, ..limits() });
    let started = Instant::now();
    finish(&mut bench.submit(work(0..10, 301))).await;
    let elapsed = started.elapsed().as_secs_f64();
    assert!((0.029..0.033).contains(&elapsed), "302 steps of 0.1 ms took {elapsed} s");
}

#[tokio::test(start_paused = true)]
async fn the_batch_is_limited_and_the_queue_is_first_come_first_served() {
    let bench = Bench::new(Limits { max_running: 2, ..limits() });
    let mut events: Vec<_> = (0..4).map(|i| bench.submit(work(i * 100..i * 100 + 10, 2))).collect();
    sleep(1).await;
    assert_eq!(bench.running_and_waiting(), (2, 2));
    let started = Instant::now();
    let mut ends = Vec::new();
    for events in &mut events {
        finish(events).await;
        ends.push(started.elapsed().as_millis());
    }
    assert_eq!(ends[0], ends[1]);
    assert!(ends[2] > ends[1]);
    assert_eq!(bench.running_and_waiting(), (0, 0));
    let queued = bench.scheduler.metrics().request_queue_time.sum;
    assert!((queued - 2.0 * 0.04).abs() < 2e-3, "{queued}");
}

#[tokio::test(start_paused = true)]
async fn a_long_prompt_is_computed_in_chunks_while_others_decode() {
    let bench = Bench::new(Limits { max_batched_tokens: 21, ..limits() });
    let mut short = bench.submit(work(0..1, 100));
    short.recv().await.unwrap();
    let started = Instant::now();
    let mut long = bench.submit(work(100..150, 1));
    let mut tokens = 0;
    loop {
        tokio::select! {
            biased;
            _ = short.recv() => tokens += 1,
            event = long.recv() => { assert!(event.unwrap().finish.is_some()); break; }
        }
    }
    // The step under way, then 20 + 20 + 10 prompt tokens beside one decoding sequence.
    assert_eq!(tokens, 4);
    assert_eq!(started.elapsed(), Duration::from_millis(10 + 30 + 30 + 20));
}

#[tokio::test(start_paused = true)]
async fn two_requests_of_one_step_share_their_prefix() {
    let bench = Bench::new(limits());
    let (mut first, mut second) = (bench.submit(work(0..10, 1)), bench.submit(work(0..10, 1)));
    assert_eq!(finish(&mut first).await.cached, 0);
    assert_eq!(finish(&mut second).await.cached, 8);
    assert_eq!(finish(&mut bench.submit(work(0..8, 1))).await.cached, 4, "one token at least is computed");
}

#[tokio::test(start_paused = true)]
async fn generated_blocks_are_reused_by_the_next_turn() {
    let bench = Bench::new(limits());
    let mut events = bench.submit(work(0..6, 7));
    let mut history: Vec<u32> = (0..6).collect();
    while let Some(event) = events.recv().await {
        history.extend(event.token);
    }
    history.extend([1, 2, 3]);
    let next = Work { tokens: history.into(), ..work(0..0, 1) };
    assert_eq!(finish(&mut bench.submit(next)).await.cached, 12);
}

#[tokio::test(start_paused = true)]
async fn the_youngest_is_preempted_when_blocks_run_out_and_still_finishes() {
    // Each request grows to 10 blocks of 4; 15 are there.
    let bench = Bench::new(Limits { blocks: 15, ..limits() });
    let (mut old, mut young) = (bench.submit(work(0..20, 20)), bench.submit(work(100..120, 20)));
    let mut order = Vec::new();
    let (mut old_tokens, mut young_tokens) = (0, 0);
    while order.len() < 2 {
        tokio::select! {
            Some(event) = old.recv() => { old_tokens += 1; if event.finish.is_some() { order.push("old"); } }
            Some(event) = young.recv() => { young_tokens += 1; if event.finish.is_some() { order.push("young"); } }
        }
    }
    assert_eq!(order, ["old", "young"]);
    assert_eq!((old_tokens, young_tokens), (20, 20));
    let metrics = bench.scheduler.metrics();
    assert!(metrics.num_preemptions > 0);
    assert!(metrics.kv_cache_usage.abs() < 1e-9);
    assert_eq!(metrics.prompt_tokens, 40, "a recomputed prompt counts once");
}

#[tokio::test(start_paused = true)]
async fn cache_usage_counts_live_blocks_only() {
    let bench = Bench::new(limits());
    let mut events = bench.submit(work(0..10, 2));
    events.recv().await.unwrap();
    assert!((bench.scheduler.metrics().kv_cache_usage - 0.03).abs() < 1e-9);
    finish(&mut events).await;
    assert!(bench.scheduler.metrics().kv_cache_usage.abs() < 1e-9);
}

#[tokio::test(start_paused = true)]
async fn an_adapter_without_a_slot_is_deferred_and_others_pass_it() {
    let bench = Bench::new(limits());
    let adapter = |name: &str, range| Work { adapter: name.into(), ..work(range, 5) };
    let _first = bench.submit(adapter("a", 0..4));
    let mut blocked = bench.submit(adapter("b", 10..14));
    let _base = bench.submit(work(20..24, 5));
    sleep(1).await;
    let metrics = bench.scheduler.metrics();
    assert_eq!((metrics.num_requests_running, metrics.waiting_deferred, metrics.waiting_capacity), (2, 1, 0));
    assert!(metrics.lora_requests.iter().any(|(running, waiting, _)| running == "a" && waiting == "b"));
    finish(&mut blocked).await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_receiver_frees_its_place_at_the_next_step() {
    let bench = Bench::new(Limits { max_running: 1, ..limits() });
    let running = bench.submit(work(0..10, 1000));
    let waiting = bench.submit(work(100..110, 1000));
    sleep(50).await;
    assert_eq!(bench.running_and_waiting(), (1, 1));
    drop((running, waiting));
    sleep(10).await;
    assert_eq!(bench.running_and_waiting(), (0, 0));
    let metrics = bench.scheduler.metrics();
    assert!(metrics.kv_cache_usage.abs() < 1e-9);
    assert_eq!(metrics.finished_length + metrics.finished_stop, 0);
}

#[tokio::test(start_paused = true)]
async fn the_queue_limit_counts_running_and_waiting() {
    let bench = Bench::new(Limits { max_running: 1, max_queued: Some(2), ..limits() });
    let kept = (bench.submit(work(0..10, 5)), bench.submit(work(0..10, 5)));
    assert!(bench.scheduler.submit(vec![work(0..10, 5)]).is_err());
    assert_eq!(bench.scheduler.metrics().rejected_requests, 1);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_engine_computes_nothing() {
    let bench = Bench::new(limits());
    bench.faults.send_modify(|faults| faults.set(Fault::Sleep(1)));
    let mut events = bench.submit(work(0..10, 1));
    sleep(60_000).await;
    assert!(events.try_recv().is_err());
    bench.faults.send_modify(Faults::clear_all);
    assert!(finish(&mut events).await.token.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_prompt_without_an_answer_ends_with_its_prefill() {
    let bench = Bench::new(limits());
    let event = finish(&mut bench.submit(work(0..10, 0))).await;
    assert_eq!((event.token, event.finish), (None, Some(Finish::Stop)));
    assert_eq!(bench.scheduler.metrics().generation_tokens, 0);
}
