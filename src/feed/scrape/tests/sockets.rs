//! The scraper against small servers on this machine.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rstest::rstest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::restricted;
use crate::feed::client::{Bounds, Client, Failure, uri};
use crate::feed::scrape::{ScrapeConfig, Scraper};
use crate::state::endpoint::tests::endpoint;
use crate::state::health::State;
use crate::state::signals::Millis;
use crate::state::{Endpoint, SignalKind};

const GOOD: &str = "process_start_time_seconds 1\nvllm:num_requests_running 1\nvllm:num_requests_waiting 2\n";
const MODELS: &str = r#"{"object":"list","data":[{"id":"m"}]}"#;

/// How a server answers: path to what is written to the socket; `None` never answers.
type Answers = Arc<dyn Fn(&str) -> Option<Vec<u8>> + Send + Sync>;

struct Server {
    address: SocketAddr,
    open: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    async fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&open);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (answers, count) = (Arc::clone(&answers), Arc::clone(&count));
                connections.spawn(async move {
                    serve(stream, answers).await;
                    count.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, open, _task: AbortOnDropHandle::new(task) }
    }

    fn endpoint(&self, name: &str) -> Arc<Endpoint> {
        endpoint(name, &self.address.to_string())
    }
}

/// Requests without bodies on one connection until it closes.
async fn serve(mut stream: TcpStream, answers: Answers) {
    let mut read = Vec::new();
    while let Ok(1..) = stream.read_buf(&mut read).await {
        let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head: Vec<u8> = read.drain(..end + 4).collect();
        let head = String::from_utf8(head).unwrap();
        match answers(head.split(' ').nth(1).unwrap()) {
            Some(answer) if stream.write_all(&answer).await.is_err() => return,
            Some(_) => {}
            None => while let Ok(1..) = stream.read_buf(&mut read).await {},
        }
    }
}

fn http(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn constant(answer: Vec<u8>) -> Answers {
    Arc::new(move |_| Some(answer.clone()))
}

/// A page on `/metrics`, a list on `/v1/models`.
fn engine(page: impl Fn(&str) -> String + Send + Sync + 'static) -> Answers {
    Arc::new(move |path| {
        Some(http(200, if path.starts_with("/metrics") { page(path) } else { MODELS.to_owned() }.as_str()))
    })
}

fn config() -> ScrapeConfig {
    ScrapeConfig {
        interval: Duration::from_millis(10),
        timeout: Duration::from_millis(150),
        models_interval: Duration::from_mins(1),
        ..ScrapeConfig::default()
    }
}

fn scraper() -> Scraper {
    Scraper::new(config(), Arc::new(|_| {}))
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn last(endpoint: &Endpoint, kind: SignalKind) -> Option<f64> {
    endpoint.signals.last(kind, Millis::now()).map(|last| last.0)
}

/// An address where nothing listens.
async fn closed() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

#[test]
fn addresses_become_urls_with_brackets_round_ipv6() {
    let url = |address: &str| uri(&endpoint("a", address).destination, "/metrics").map(|uri| uri.to_string());
    assert_eq!(url("[fd00::10]:8000").as_deref(), Some("http://[fd00::10]:8000/metrics"));
    assert_eq!(url("10.0.0.5:8001").as_deref(), Some("http://10.0.0.5:8001/metrics"));
}

#[tokio::test]
async fn a_closed_port_is_refused_and_a_mute_one_is_not() {
    let ask = |address: SocketAddr| async move {
        let client = Client::new(&address.to_string(), bounds(100));
        client.get("/metrics").await.map(|answer| answer.status)
    };
    assert_eq!(ask(closed().await).await, Err(Failure::Refused));
    assert_eq!(ask(Server::start(Arc::new(|_| None)).await.address).await, Err(Failure::Silent));
    let not_http = Server::start(constant(b"220 mail ready\r\n".to_vec())).await;
    assert_eq!(ask(not_http.address).await, Err(Failure::Silent));
    assert_eq!(ask(Server::start(constant(http(503, ""))).await.address).await, Ok(503));
}

#[rstest]
#[case::fits(10, 10, 10, true)]
#[case::too_large(11, 10, 10, false)]
#[case::ends_early(5, 100, 5, false)]
#[tokio::test]
async fn a_body_is_read_as_far_as_it_fits_and_comes(
    #[case] sent: usize,
    #[case] announced: usize,
    #[case] read: usize,
    #[case] whole: bool,
) {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", announced.max(sent));
    let server = Server::start(constant([head.as_bytes(), &vec![b'x'; sent]].concat())).await;
    let client = Client::new(&server.address.to_string(), bounds(10));
    let answer = client.get("/metrics").await.unwrap();
    assert_eq!((answer.body.len(), answer.whole), (read, whole));
}

#[tokio::test]
async fn an_engine_comes_up_is_read_and_goes_down() {
    let server = Server::start(engine(|path| restricted(GOOD, path))).await;
    let endpoint = server.endpoint("a");
    let scraper = scraper();
    assert_eq!(endpoint.health.state(), State::Starting);
    scraper.follow(&[Arc::clone(&endpoint)]);
    until("the page is read", || last(&endpoint, SignalKind::Foreign) == Some(3.0)).await;
    assert_eq!(endpoint.health.state(), State::Up);
    until("the models are read", || endpoint.adapters.load().is_some()).await;
    assert_eq!(endpoint.adapters.load().as_ref().unwrap().served, [Box::from("m")]);
    until("the status is shown", || scraper.status(endpoint.slot).unwrap().dialect == Some("vLLM")).await;
    assert!(scraper.status(endpoint.slot).unwrap().filtered);
    drop(server);
    until("the endpoint is down", || endpoint.health.state() == State::Down).await;
    assert_eq!(last(&endpoint, SignalKind::Running), Some(1.0), "the last value grows old");
    assert_eq!(endpoint.adapters.load().as_ref().unwrap().served, [Box::from("m")], "the last list stays");
}

#[tokio::test]
async fn broken_endpoints_stay_unknown_and_do_not_delay_a_good_one() {
    let unrelated = format!("{}\n", "unrelated_series{a=\"b\"} 1\n".repeat(800_000));
    let servers = [
        ("500", constant(http(500, "no"))),
        ("empty", constant(http(200, ""))),
        ("html", constant(http(200, "<html></html>"))),
        ("hangs", Arc::new(|_: &str| None) as Answers),
        ("20 MB", constant(http(200, &unrelated))),
    ];
    let mut broken = Vec::new();
    for (name, answers) in servers {
        let server = Server::start(answers).await;
        broken.push((server.endpoint(name), server));
    }
    let pages = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&pages);
    let good = Server::start(engine(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        GOOD.to_owned()
    }))
    .await;
    let good_endpoint = good.endpoint("good");
    let refused = endpoint("refused", &closed().await.to_string());
    let mut all: Vec<Arc<Endpoint>> = broken.iter().map(|(endpoint, _)| Arc::clone(endpoint)).collect();
    all.extend([Arc::clone(&good_endpoint), Arc::clone(&refused)]);
    let config = ScrapeConfig { timeout: Duration::from_millis(500), ..config() };
    let scraper = Scraper::new(config, Arc::new(|_| {}));
    scraper.follow(&all);
    let hangs = &broken[3].0;
    until("the silent port counts as accepted", || hangs.health.state() == State::Up).await;
    assert!(pages.load(Ordering::SeqCst) > 1, "the good endpoint was read again while another hung");
    for (endpoint, _) in &broken {
        until("every endpoint was asked", || endpoint.health.state() == State::Up).await;
        assert!(SignalKind::ALL.iter().all(|&kind| last(endpoint, kind).is_none()), "{}", endpoint.name);
        assert!(endpoint.adapters.load().is_none(), "{}", endpoint.name);
    }
    assert_eq!(last(&good_endpoint, SignalKind::Running), Some(1.0));
    assert_eq!(refused.health.state(), State::Starting, "it never accepted");
}

#[tokio::test]
async fn several_processes_behind_a_port_are_read_by_full_pages() {
    // Their filtered page is empty.
    let answer = |path: &str| if path.contains('?') { String::new() } else { GOOD.replace("process_", "# ") };
    let server = Server::start(engine(answer)).await;
    let endpoint = server.endpoint("a");
    let scraper = scraper();
    scraper.follow(&[Arc::clone(&endpoint)]);
    until("the full page is read", || last(&endpoint, SignalKind::Waiting) == Some(2.0)).await;
    until("the status is shown", || scraper.status(endpoint.slot).unwrap().dialect.is_some()).await;
    assert!(!scraper.status(endpoint.slot).unwrap().filtered);
}

#[tokio::test]
async fn a_restart_is_told_and_the_models_are_asked_again() {
    let process = Arc::new(AtomicU64::new(1));
    let lists = Arc::new(AtomicU64::new(0));
    let (start, asked) = (Arc::clone(&process), Arc::clone(&lists));
    let server = Server::start(Arc::new(move |path: &str| {
        let start = start.load(Ordering::SeqCst);
        if path.starts_with("/metrics") {
            return Some(http(
                200,
                &format!("process_start_time_seconds {start}\nvllm:num_requests_running 1\n"),
            ));
        }
        asked.fetch_add(1, Ordering::SeqCst);
        Some(http(200, &format!(r#"{{"data":[{{"id":"m{start}"}}]}}"#)))
    }))
    .await;
    let endpoint = server.endpoint("a");
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = Arc::clone(&told);
    let scraper = Scraper::new(config(), Arc::new(move |endpoint| tell.lock().push(endpoint.slot)));
    scraper.follow(&[Arc::clone(&endpoint)]);
    let serves =
        |name: &str| endpoint.adapters.load().as_ref().is_some_and(|adapters| &*adapters.served[0] == name);
    until("the first process is known", || serves("m1")).await;
    assert_eq!(*told.lock(), [0_u64; 0]);
    process.store(2, Ordering::SeqCst);
    until("the restart is told", || *told.lock() == [endpoint.slot]).await;
    until("the models are those of the second", || serves("m2")).await;
    let before = lists.load(Ordering::SeqCst);
    scraper.refresh_models(&endpoint);
    until("the list is asked for on request", || lists.load(Ordering::SeqCst) == before + 1).await;
}

#[tokio::test]
async fn who_leaves_is_left_alone_and_who_stays_is_not_disturbed() {
    let server = Server::start(engine(|_| GOOD.to_owned())).await;
    let other = Server::start(engine(|_| GOOD.to_owned())).await;
    let (stays, leaves) = (server.endpoint("stays"), other.endpoint("leaves"));
    let scraper = scraper();
    scraper.follow(&[Arc::clone(&stays), Arc::clone(&leaves)]);
    until("both are connected", || {
        [&stays, &leaves].iter().all(|endpoint| endpoint.health.state() == State::Up)
    })
    .await;
    scraper.follow(&[Arc::clone(&stays)]);
    until("connections are closed", || other.open.load(Ordering::SeqCst) == 0).await;
    assert_eq!(scraper.status(leaves.slot), None);
    assert!(scraper.status(stays.slot).is_some());
    assert!(server.open.load(Ordering::SeqCst) > 0);
    scraper.clone().stop();
    until("all connections are closed", || server.open.load(Ordering::SeqCst) == 0).await;
    until("the task let go of its endpoint", || Arc::strong_count(&stays) == 1).await;
}

#[tokio::test]
async fn own_bookings_are_those_of_when_the_page_was_asked_for() {
    let server = Server::start(engine(|_| GOOD.to_owned())).await;
    let endpoint = server.endpoint("a");
    endpoint.booked.requests.store(2, Ordering::Release);
    let scraper = scraper();
    scraper.follow(&[Arc::clone(&endpoint)]);
    until("the page is read", || last(&endpoint, SignalKind::Foreign) == Some(1.0)).await;
}

fn bounds(max_body: usize) -> Bounds {
    Bounds { timeout: Duration::from_millis(100), max_body, connections: 1 }
}
