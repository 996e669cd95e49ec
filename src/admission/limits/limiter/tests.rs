//! What the limiter charges, by whose bucket, with and without a store.

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rstest::rstest;

use super::*;
use crate::admission::limits::bucket::{self, Bucket};
use crate::admission::limits::store::Spent;
use crate::admission::limits::{Rate, Together, Unit};

const MINUTE: Rate = Rate { tokens: 100, unit: Unit::Minute };
const ASK: Both<Option<u64>> = Both { input: Some(10), output: Some(0) };

fn limit(route: &str) -> Limit {
    Limit {
        route: route.into(),
        model: "m".into(),
        rates: Both { input: Some(MINUTE), output: Some(MINUTE) },
        per: Per::Route,
        together: None,
    }
}

fn limiter(settings: Settings, store: Option<Arc<Shelf>>) -> Arc<Limiter> {
    let stores = store.map(|store| Arc::new(Shelves(store)) as Arc<dyn Stores>);
    Arc::new(Limiter::new(settings, stores))
}

fn charge(
    limiter: &Arc<Limiter>,
    limit: &Limit,
    who: &str,
    asks: Both<Option<u64>>,
) -> Result<Charge, Denied> {
    let limit = Arc::new(limit.clone());
    let charged = limiter.charge(&limit, &Identity::named(who), asks).now_or_never();
    charged.expect("nothing is waited for")
}

fn level(limiter: &Limiter, route: &str, owner: Option<&str>) -> Option<Both<f64>> {
    let shown = limiter.shown(100);
    let found = shown.iter().find(|shown| *shown.route == *route && shown.owner.name() == owner);
    found.map(|shown| shown.levels)
}

#[tokio::test(start_paused = true)]
async fn routes_have_buckets_of_their_own_and_so_have_identities_if_asked() {
    let limiter = limiter(Settings::default(), None);
    let (a, b) = (limit("default/a"), Limit { per: Per::Identity, ..limit("default/b") });
    for (limit, who) in [(&a, "alice"), (&a, "bob"), (&b, "alice"), (&b, "alice"), (&b, "bob")] {
        charge(&limiter, limit, who, ASK).unwrap().keep();
    }
    let left = |route, owner| level(&limiter, route, owner).map(|level| level.input);
    assert_eq!(left("default/a", None), Some(80.0), "one model's two routes do not share");
    assert_eq!(left("default/b", Some("alice")), Some(80.0));
    assert_eq!(left("default/b", Some("bob")), Some(90.0));
}

#[tokio::test(start_paused = true)]
async fn a_charge_comes_back_whole_unless_it_is_settled() {
    let limiter = limiter(Settings::default(), None);
    let limit = limit("default/a");
    drop(charge(&limiter, &limit, "x", ASK).unwrap());
    charge(&limiter, &limit, "x", ASK).unwrap().keep();
    assert_eq!(level(&limiter, "default/a", None), Some(Both { input: 90.0, output: 100.0 }));
    charge(&limiter, &limit, "x", ASK).unwrap().settle(Tokens { input: 12, output: 500 });
    assert_eq!(level(&limiter, "default/a", None), Some(Both { input: 78.0, output: -400.0 }));
    let Err(Denied::Limited(limited)) = charge(&limiter, &limit, "x", ASK) else { panic!("admitted") };
    assert_eq!((limited.kind, limited.retry_after.as_secs_f64()), (Kind::Output, 240.6));
    let only_input = Both { output: None, ..ASK };
    let embeds = charge(&limiter, &limit, "x", only_input).expect("what has no output is not asked for any");
    embeds.settle(Tokens { input: 10, output: 256 });
    assert_eq!(level(&limiter, "default/a", None), Some(Both { input: 68.0, output: -400.0 }));
}

#[tokio::test(start_paused = true)]
async fn limits_that_change_keep_levels_and_those_that_go_are_gone() {
    let limiter = limiter(Settings::default(), None);
    let follow = |limits: &[&Limit]| {
        let limits: Vec<Arc<Limit>> = limits.iter().map(|limit| Arc::new(Limit::clone(limit))).collect();
        limiter.follow(limits.iter());
    };
    let both = limit("default/a");
    let other = limit("default/b");
    follow(&[&both, &other]);
    charge(&limiter, &both, "x", ASK).unwrap().settle(Tokens { input: 160, output: 30 });
    charge(&limiter, &other, "x", ASK).unwrap().keep();
    charge(&limiter, &both, "x", ASK).unwrap_err();
    assert_eq!(limiter.rejections().iter().map(|r| r.rejected.input).sum::<u64>(), 1);

    let output_only = Limit { rates: Both { input: None, ..both.rates }, ..both.clone() };
    follow(&[&output_only, &other]);
    charge(&limiter, &output_only, "x", ASK).expect("the field that is gone limits nothing").keep();
    assert_eq!(level(&limiter, "default/a", None), Some(Both { input: 0.0, output: 70.0 }));

    let wide = Rate { tokens: 1_000, unit: Unit::Minute };
    let wider = Limit { rates: Both { input: None, output: Some(wide) }, ..both.clone() };
    follow(&[&wider, &other]);
    assert_eq!(level(&limiter, "default/a", None).unwrap().output, 70.0);
    assert_eq!(
        limiter.rejections().iter().map(|r| r.rejected.input).sum::<u64>(),
        1,
        "what was counted stays"
    );

    follow(&[&other]);
    assert_eq!(level(&limiter, "default/a", None), None);
    assert_eq!(level(&limiter, "default/b", None).unwrap().input, 90.0);
}

#[rstest]
#[case(Reserve::None, Some(50), 3, 0)]
#[case(Reserve::MaxTokens, Some(50), 3, 150)]
#[case(Reserve::MaxTokens, Some(0), 1, 0)]
#[case(Reserve::MaxTokens, None, 2, 400)]
#[case(Reserve::MaxTokens, Some(u64::MAX), u32::MAX, u64::MAX)]
fn output_is_reserved_by_the_bound(
    #[case] reserve: Reserve,
    #[case] max_tokens: Option<u64>,
    #[case] answers: u32,
    #[case] expected: u64,
) {
    let limiter = limiter(Settings { reserve, ..Settings::default() }, None);
    assert_eq!(limiter.output(max_tokens, answers), expected);
}

/// A store without a network: as Redis keeps it, but that it fails when told to.
#[derive(Debug, Default)]
struct Shelf {
    state: Mutex<ShelfState>,
}

#[derive(Debug, Default)]
struct ShelfState {
    away: bool,
    replicas: u32,
    buckets: AHashMap<Name, (Rate, Bucket)>,
    waiting: Vec<Spent>,
    began: Option<Instant>,
}

impl Shelf {
    fn of(replicas: u32) -> Arc<Self> {
        let state = ShelfState { replicas, began: Some(Instant::now()), ..ShelfState::default() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    fn set_away(&self, away: bool) {
        let mut state = self.state.lock();
        state.away = away;
        if !away {
            let now = state.now();
            for spent in std::mem::take(&mut state.waiting) {
                state.bucket(&spent.name, spent.rate).spend(spent.rate, spent.tokens as f64, now);
            }
        }
    }

    fn level(&self, name: &str, rate: Rate) -> f64 {
        let mut state = self.state.lock();
        let now = state.now();
        state.bucket(&Name(name.into()), rate).level(rate, now)
    }
}

impl ShelfState {
    fn now(&self) -> Duration {
        self.began.map(|began| began.elapsed()).unwrap_or_default()
    }

    fn bucket(&mut self, name: &Name, rate: Rate) -> &mut Bucket {
        let now = self.now();
        &mut self.buckets.entry(name.clone()).or_insert_with(|| (rate, Bucket::full(rate, now))).1
    }
}

impl Store for Shelf {
    fn is_well(&self) -> bool {
        !self.state.lock().away
    }

    fn replicas(&self) -> u32 {
        self.state.lock().replicas
    }

    fn check(&self, demands: Both<Option<Demand>>) -> BoxFuture<'_, Option<Answer>> {
        let mut state = self.state.lock();
        let now = state.now();
        let mut levels = Both::default();
        let asked: Vec<Demand> = [demands.input, demands.output].into_iter().flatten().collect();
        let mut enough = true;
        for demand in &asked {
            let level = state.bucket(&demand.name, demand.rate).level(demand.rate, now);
            *levels.get_mut(demand.kind) = level;
            enough &= level + bucket::SLACK >= demand.rate.needed(demand.kind, demand.amount);
        }
        let mut taken = Tokens::default();
        for demand in asked.iter().filter(|_| enough) {
            let amount = demand.rate.taken(demand.kind, demand.amount, *levels.get(demand.kind));
            *taken.get_mut(demand.kind) = amount;
            state.bucket(&demand.name, demand.rate).spend(demand.rate, bucket::exact(amount), now);
        }
        let answer = Answer { taken: enough.then_some(taken), levels };
        Box::pin(std::future::ready(Some(answer)))
    }

    fn add(&self, spent: Spent) {
        let mut state = self.state.lock();
        let now = state.now();
        if state.away {
            state.waiting.push(spent);
        } else {
            state.bucket(&spent.name, spent.rate).spend(spent.rate, spent.tokens as f64, now);
        }
    }
}

#[derive(Debug)]
struct Shelves(Arc<Shelf>);

impl Stores for Shelves {
    fn allows(&self, address: &str) -> bool {
        address == "redis:6379"
    }

    fn open(&self, address: &str) -> Option<Arc<dyn Store>> {
        self.allows(address).then(|| Arc::clone(&self.0) as Arc<dyn Store>)
    }

    fn lost(&self) -> u64 {
        0
    }
}

fn together(route: &str, address: &str) -> Limit {
    Limit { together: Some(Together { address: address.into(), name: "m".into() }), ..limit(route) }
}

/// Replicas that follow one limit counted together.
fn replicas(n: u32, outage: Outage, limit: &Limit) -> (Arc<Shelf>, Vec<Arc<Limiter>>) {
    let shelf = Shelf::of(n);
    let settings = Settings { outage, ..Settings::default() };
    let limiters: Vec<_> = (0..n).map(|_| limiter(settings, Some(Arc::clone(&shelf)))).collect();
    for limiter in &limiters {
        limiter.follow(std::iter::once(&Arc::new(limit.clone())));
    }
    (shelf, limiters)
}

#[tokio::test(start_paused = true)]
async fn replicas_share_buckets_under_kthenas_names() {
    let limit = together("default/a", "redis:6379");
    let (shelf, limiters) = replicas(2, Outage::Local, &limit);
    for limiter in &limiters {
        charge(limiter, &limit, "x", ASK).unwrap().settle(Tokens { input: 10, output: 50 });
    }
    assert_eq!(shelf.level("kthena:ratelimit:m:input", MINUTE), 80.0);
    assert_eq!(shelf.level("kthena:ratelimit:m:output", MINUTE), 0.0);
    assert!(limiters.iter().all(|limiter| charge(limiter, &limit, "x", ASK).is_err()));
    let per_identity = Limit { per: Per::Identity, ..limit };
    charge(&limiters[0], &per_identity, "alice", ASK).unwrap().keep();
    assert_eq!(shelf.level("kthena:ratelimit:m#alice:input", MINUTE), 90.0);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_not_allowed_leaves_the_limit_to_each_replica() {
    let limit = together("default/a", "evil:6379");
    let (shelf, limiters) = replicas(2, Outage::Closed, &limit);
    charge(&limiters[0], &limit, "x", ASK).unwrap().settle(Tokens { input: 10, output: 500 });
    assert!(charge(&limiters[0], &limit, "x", ASK).is_err());
    assert!(charge(&limiters[1], &limit, "x", ASK).is_ok());
    assert!(shelf.state.lock().buckets.is_empty());
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_the_operator_decides() {
    let limit = together("default/a", "redis:6379");
    let (shelf, limiters) = replicas(2, Outage::Closed, &limit);
    shelf.set_away(true);
    assert_eq!(charge(&limiters[0], &limit, "x", ASK).unwrap_err(), Denied::Unavailable);
    let (shelf, limiters) = replicas(2, Outage::Open, &limit);
    shelf.set_away(true);
    for _ in 0..100 {
        charge(&limiters[0], &limit, "x", ASK).unwrap().settle(Tokens { input: 10, output: 10 });
    }
    shelf.set_away(false);
    assert_eq!(shelf.level("kthena:ratelimit:m:output", MINUTE), 100.0, "what nobody limits is not counted");
}

#[tokio::test(start_paused = true)]
async fn each_replica_counts_its_part_and_tells_the_store_when_it_is_back() {
    let limit = together("default/a", "redis:6379");
    let (shelf, limiters) = replicas(2, Outage::Local, &limit);
    let before = charge(&limiters[0], &limit, "x", ASK).unwrap();
    shelf.set_away(true);
    for limiter in &limiters {
        for _ in 0..5 {
            charge(limiter, &limit, "x", ASK).unwrap().settle(Tokens { input: 10, output: 2 });
        }
        let Err(Denied::Limited(limited)) = charge(limiter, &limit, "x", ASK) else { panic!("admitted") };
        assert_eq!((limited.kind, limited.standing.limit), (Kind::Input, 50));
    }
    before.settle(Tokens { input: 10, output: 60 });
    let parts: Vec<f64> = limiters.iter().map(|l| level(l, "default/a", None).unwrap().output).collect();
    assert_eq!(parts, [-20.0, 40.0], "what was used of an earlier charge counts in the part");
    shelf.set_away(false);
    assert_eq!(shelf.level("kthena:ratelimit:m:input", MINUTE), -10.0);
    assert_eq!(shelf.level("kthena:ratelimit:m:output", MINUTE), 20.0);
}

/// Random requests at two replicas whose store goes and comes: what is used stays below the limit times the time, one bucket,
/// one bucket more for outages, and what single requests borrowed; and nobody is refused while credit stands.
#[tokio::test(start_paused = true)]
async fn no_schedule_of_requests_and_outages_gets_more_than_is_documented() {
    for seed in 0..40 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let limit = together("default/a", "redis:6379");
        let (shelf, limiters) = replicas(2, Outage::Local, &limit);
        let (began, mut away, mut open) = (Instant::now(), false, Vec::new());
        let mut used = Both::<f64>::default();
        let mut borrowed = Both::<f64>::default();
        for _ in 0..400 {
            tokio::time::advance(Duration::from_millis(rng.random_range(0..4_000))).await;
            if rng.random_bool(0.05) {
                away = !away;
                shelf.set_away(away);
            }
            let limiter = &limiters[rng.random_range(0..2)];
            let amount = rng.random_range(0..60_u64);
            let asks = Both { input: Some(amount), output: Some(0) };
            match charge(limiter, &limit, "x", asks) {
                Ok(charge) => open.push((charge, amount)),
                Err(_) if away => {}
                Err(_) => {
                    let short = |kind: Kind, amount| {
                        let name = format!("kthena:ratelimit:m:{}", kind.name());
                        shelf.level(&name, MINUTE) < MINUTE.needed(kind, amount)
                    };
                    assert!(
                        short(Kind::Input, amount) || short(Kind::Output, 0),
                        "seed {seed}: refused while credit stands"
                    );
                }
            }
            // Few are open at a time, so that what is borrowed has a bound.
            while open.len() > 2 || (!open.is_empty() && rng.random_bool(0.5)) {
                let (charge, input) = open.remove(0);
                if rng.random_bool(0.2) {
                    continue;
                }
                let output = rng.random_range(0..80_u64);
                charge.settle(Tokens { input, output });
                used.input += input as f64;
                used.output += output as f64;
                borrowed.output = 3.0 * 80.0;
                borrowed.input = 0.0;
            }
        }
        let elapsed = began.elapsed().as_secs_f64();
        for kind in Kind::ALL {
            let bound = 2.0f64.mul_add(MINUTE.capacity(), MINUTE.per_second() * elapsed) + borrowed.get(kind);
            let used = *used.get(kind);
            assert!(used <= bound + 1.0, "seed {seed}: {used} {} tokens used, {bound} allowed", kind.name());
        }
    }
}
