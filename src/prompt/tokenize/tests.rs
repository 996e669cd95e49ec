//! The service, its threads replaced by the test where the order of events matters.

use std::path::Path;

use super::*;
use crate::request::{LlmRequest, parse};

const DIR: &str = "tests/data/tokenizers";
const BUDGET: Duration = Duration::from_millis(30);

fn file() -> TokenizerSource {
    TokenizerSource::File("small".into())
}

/// A request and its body.
struct Sent {
    path: &'static str,
    request: LlmRequest,
    body: Bytes,
}

fn sent(path: &'static str, body: &str) -> Sent {
    let body = Bytes::copy_from_slice(body.as_bytes());
    Sent { path, request: parse(path, None, &body).unwrap(), body }
}

fn completion(prompt: &str) -> Sent {
    sent("/v1/completions", &serde_json::json!({"model": "m", "prompt": prompt}).to_string())
}

impl Sent {
    fn ask<'a>(&'a self, source: Option<&'a TokenizerSource>) -> Ask<'a> {
        Ask {
            source,
            pool: "default/p",
            request: &self.request,
            path: self.path,
            body: &self.body,
            model: "real",
            engine: Some((([10, 0, 0, 1], 8000).into(), EngineKind::Vllm)),
            budget: BUDGET,
        }
    }
}

fn options(threads: usize) -> Options {
    Options { dir: Some(DIR.into()), threads, ..Options::default() }
}

/// A service whose tokenizer is loaded and whose work is done by [`work`] only.
fn still(options: Options) -> Tokenizers {
    let service = Tokenizers::new(Options { threads: 0, ..options }, None).unwrap();
    service.follow([&file()]);
    wait_until(|| service.is_ready("small"));
    service
}

#[expect(clippy::disallowed_types, reason = "the clock of tokio stands still")]
fn wait_until(mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "it never came true");
        std::thread::yield_now();
    }
}

fn work(service: &Tokenizers) -> bool {
    service.shared.queue.work_now(&service.shared.cache)
}

fn expected(text: &str, around: crate::prompt::tokenizer::Around) -> Vec<u32> {
    crate::prompt::tokenizer::LocalTokenizer::load(&Path::new(DIR).join("small"))
        .unwrap()
        .encode(text, around)
        .unwrap()
}

#[tokio::test]
async fn threads_answer_and_a_second_time_the_cache_does() {
    let service = Tokenizers::new(options(1), None).unwrap();
    let (source, hello) = (file(), completion("Hello world"));
    assert_eq!(
        service.tokens(hello.ask(Some(&source))).await,
        Err(Skipped::NoTokenizer),
        "it loads in the background"
    );
    wait_until(|| service.is_ready("small"));
    let ask = Ask { budget: Duration::from_secs(20), ..hello.ask(Some(&source)) };
    let tokens = service.tokens(ask).await.unwrap();
    assert_eq!(tokens.origin(), Origin::Local);
    assert_eq!(tokens[..], expected("Hello world", crate::prompt::tokenizer::Around::Added));
    let again = service.tokens(Ask { budget: Duration::ZERO, ..ask }).await.unwrap();
    assert_eq!(again, tokens);
}

#[tokio::test(start_paused = true)]
async fn a_chat_is_rendered_without_tokens_around() {
    let service = still(options(0));
    let source = file();
    let chat = sent("/v1/chat/completions", r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#);
    let (answer, ()) =
        tokio::join!(service.tokens(chat.ask(Some(&source))), async { assert!(work(&service)) });
    let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(answer.unwrap()[..], expected(text, crate::prompt::tokenizer::Around::NotAdded));
}

#[tokio::test(start_paused = true)]
async fn ids_in_the_body_need_no_tokenizer_and_others_say_why_there_are_none() {
    let service = Tokenizers::new(Options { threads: 0, ..Options::default() }, None).unwrap();
    let ids = sent("/v1/completions", r#"{"model":"m","prompt":[[1,2,3],[4]]}"#);
    let tokens = service.tokens(ids.ask(None)).await.unwrap();
    assert_eq!((&tokens[..], tokens.origin()), (&[1, 2, 3][..], Origin::Body));
    let image = r#"{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
    for (sent, source, reason) in [
        (sent("/v1/chat/completions", image), Some(file()), Skipped::Media),
        (completion("x"), None, Skipped::NoTokenizer),
        (sent("/v1/completions", r#"{"model":"m"}"#), Some(file()), Skipped::Unsupported),
        (completion("x"), Some(TokenizerSource::Engine), Skipped::NoTokenizer),
    ] {
        assert_eq!(service.tokens(sent.ask(source.as_ref())).await, Err(reason));
    }
    let counted: u64 = service.skipped().read().map(|(_, count)| count).sum();
    assert_eq!(counted, 4);
}

#[tokio::test(start_paused = true)]
async fn what_comes_too_late_warms_the_cache() {
    let service = still(options(0));
    let (source, long) = (file(), completion("one two three"));
    let began = tokio::time::Instant::now();
    assert_eq!(service.tokens(long.ask(Some(&source))).await, Err(Skipped::Deadline));
    assert_eq!(began.elapsed().as_millis(), BUDGET.as_millis());
    assert_eq!(service.load().requests, 1, "the work goes on");
    assert!(work(&service));
    assert!(service.tokens(Ask { budget: Duration::ZERO, ..long.ask(Some(&source)) }).await.is_ok());
    assert_eq!((service.load().requests, service.load().bytes), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn behind_a_long_queue_a_prompt_is_only_warmed_and_only_once() {
    let service = still(options(0));
    let source = file();
    // At 6 MB/s these 600 KB take 100 ms.
    let first = completion(&"word ".repeat(120_000));
    assert_eq!(service.tokens(first.ask(Some(&source))).await, Err(Skipped::Deadline));
    let began = tokio::time::Instant::now();
    let second = completion("a short one");
    for _ in 0..3 {
        assert_eq!(service.tokens(second.ask(Some(&source))).await, Err(Skipped::Deadline));
    }
    assert_eq!(began.elapsed(), Duration::ZERO, "nobody waits for what cannot come in time");
    assert_eq!(service.load().requests, 2);
    assert!(work(&service) && work(&service) && !work(&service));
    assert!(service.tokens(Ask { budget: Duration::ZERO, ..second.ask(Some(&source)) }).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded_by_requests_and_by_bytes() {
    let source = file();
    let few = still(Options { queue_requests: 1, ..options(0) });
    assert_eq!(few.tokens(completion("a").ask(Some(&source))).await, Err(Skipped::Deadline));
    assert_eq!(few.tokens(completion("b").ask(Some(&source))).await, Err(Skipped::QueueFull));
    let small = still(Options { queue_bytes: 100, ..options(0) });
    assert_eq!(small.tokens(completion(&"x".repeat(100)).ask(Some(&source))).await, Err(Skipped::QueueFull));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_request_gives_way_to_one_that_waits() {
    let service = still(options(0));
    let (source, dropped, waiting) = (file(), completion("dropped"), completion("waiting"));
    {
        let mut future = Box::pin(service.tokens(dropped.ask(Some(&source))));
        assert!(futures::poll!(&mut future).is_pending());
    }
    let mut future = Box::pin(service.tokens(waiting.ask(Some(&source))));
    assert!(futures::poll!(&mut future).is_pending());
    assert!(work(&service));
    assert!(future.await.is_ok());
    assert_eq!(service.load().requests, 1, "the dropped one is still there to warm the cache");
    assert!(work(&service));
    assert!(service.tokens(Ask { budget: Duration::ZERO, ..dropped.ask(Some(&source)) }).await.is_ok());
}

#[test]
fn files_that_are_missing_broken_or_elsewhere_are_problems_for_the_operator() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("broken")).unwrap();
    std::fs::write(dir.path().join("broken/tokenizer.json"), "{}").unwrap();
    std::os::unix::fs::symlink(std::fs::canonicalize(DIR).unwrap().join("small"), dir.path().join("link"))
        .unwrap();
    let service =
        Tokenizers::new(Options { dir: Some(dir.path().to_owned()), threads: 0, ..Options::default() }, None)
            .unwrap();
    let sources: Vec<TokenizerSource> =
        ["broken", "missing", "link"].map(|file| TokenizerSource::File(file.into())).into();
    service.follow(&sources);
    wait_until(|| service.problems().len() == 3);
    let problems = service.problems();
    assert!(problems[0].1.contains("is not valid"), "{problems:?}");
    assert!(problems[1].1.contains("out of --tokenizer-dir"), "{problems:?}");
    assert!(problems[2].1.contains("copy the model's tokenizer.json there"), "{problems:?}");
    let get = |file: &str| service.shared.library.get(&file.into()).map(|_| ());
    assert_eq!(
        (get("broken"), get("missing"), get("link")),
        (Err(Skipped::Failed), Err(Skipped::NoTokenizer), Err(Skipped::Failed))
    );
    // Mended, it is loaded without a restart; dropped, it is forgotten.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(format!("{DIR}/small/{name}"), dir.path().join("broken").join(name)).unwrap();
    }
    service.follow(&sources[..1]);
    wait_until(|| service.is_ready("broken"));
    assert!(service.problems().is_empty());
}

/// Answers when told to, and counts how often it was asked.
#[derive(Debug, Default)]
struct Far {
    asked: std::sync::atomic::AtomicUsize,
    answer: Arc<tokio::sync::Notify>,
    expected: Mutex<Option<Duration>>,
    seen: Mutex<Vec<RemoteAsk>>,
}

impl Remote for Far {
    fn ids(&self, ask: RemoteAsk) -> BoxFuture<'static, Outcome> {
        self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.seen.lock().push(ask);
        let answer = Arc::clone(&self.answer);
        async move {
            answer.notified().await;
            Ok(Arc::from([7, 8]))
        }
        .boxed()
    }

    fn expected(&self, _: &Target) -> Option<Duration> {
        *self.expected.lock()
    }
}

#[tokio::test(start_paused = true)]
async fn a_remote_tokenizer_is_asked_once_a_body_and_its_late_answer_is_kept() {
    let far = Arc::new(Far::default());
    let service = Tokenizers::new(
        Options { threads: 0, ..Options::default() },
        Some(Arc::clone(&far) as Arc<dyn Remote>),
    )
    .unwrap();
    let (source, hello) = (TokenizerSource::Engine, completion("hello"));
    let ask = hello.ask(Some(&source));
    let (one, two) = tokio::join!(service.tokens(ask), service.tokens(ask));
    assert_eq!((one, two), (Err(Skipped::Deadline), Err(Skipped::Deadline)));
    assert_eq!(far.asked.load(std::sync::atomic::Ordering::Relaxed), 1);
    assert_eq!(&far.seen.lock()[0].body[..], br#"{"model":"real","prompt":"hello"}"#);
    *far.expected.lock() = Some(BUDGET * 2);
    let began = tokio::time::Instant::now();
    assert_eq!(service.tokens(ask).await, Err(Skipped::Deadline));
    assert_eq!(began.elapsed(), Duration::ZERO, "nobody waits for a target known to be too slow");
    far.answer.notify_one();
    let tokens = loop {
        match service.tokens(ask).await {
            Ok(tokens) => break tokens,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!((&tokens[..], tokens.origin()), (&[7, 8][..], Origin::Remote));
    assert!(service.shared.flights.lock().is_empty());
}

/// The capture's engine had DeepSeek's vocabulary and a template of this shape.
const CAPTURED_TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}";

/// What a real vLLM answered to `/tokenize` and `/render`; where `scripts/tokenizers.py` fetched its vocabulary.
#[test]
fn ids_are_those_of_a_real_vllm() {
    let cache = std::env::var_os("PILOTFISH_CACHE").map(PathBuf::from).unwrap_or_default();
    let vocabulary = cache.join("tokenizers/deepseek");
    if !vocabulary.exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(vocabulary.join(name), dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), CAPTURED_TEMPLATE).unwrap();
    let tokenizer = crate::prompt::tokenizer::LocalTokenizer::load(dir.path()).unwrap();
    let cache = TokenCache::new(1 << 20);
    let data = Path::new("tests/data/vllm");
    for (file, path) in [
        ("tok_completion", "/v1/completions"),
        ("tok_chat_gen", "/v1/chat/completions"),
        ("tok_chat_nogen", "/v1/chat/completions"),
        ("tok_chat_continue", "/v1/chat/completions"),
        ("tok_chat_tools", "/v1/chat/completions"),
        ("render_chat", "/v1/chat/completions"),
        ("render_comp", "/v1/completions"),
        ("render_messages", "/v1/messages"),
        ("render_responses", "/v1/responses"),
    ] {
        let capture = std::fs::read_to_string(data.join(format!("{file}.txt"))).unwrap();
        let body = capture.lines().next().unwrap().split_once(" -d ").unwrap().1;
        let answer: serde_json::Value =
            serde_json::from_str(capture.split("\n\n").nth(1).unwrap().trim()).unwrap();
        let first = answer.as_array().map_or(&answer, |all| &all[0]);
        let ids = first.get("token_ids").or(first.get("tokens")).unwrap();
        let expected: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
        let sent = sent(path, body);
        let text = sent.ask(None).prompt_text().unwrap();
        let found = prompt_ids(&tokenizer, &cache, sent.request.api, &sent.body, text.as_deref());
        assert_eq!(found.as_deref(), Ok(&expected[..]), "{file}");
    }
}
