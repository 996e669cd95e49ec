//! What runs inside Redis: each script is one step that nobody comes between, by the clock of Redis.
//!
//! Buckets are hashes with Kthena's fields `tokens` and `last_update` (seconds). A full bucket is none, and every other
//! expires a minute after it would be full.

use std::sync::LazyLock;

use redis::{ErrorKind, RedisError, RedisResult, Script, ScriptInvocation};

use crate::admission::limits::store::{Answer, Demand, Spent};
use crate::admission::limits::{Both, Kind, Rate};
use crate::feed::redis::connection::says;
use crate::feed::redis::link::Link;

const REPLICAS: &str = "pilotfish:limits:replicas";

const BUCKETS: &str = "
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function level(key, capacity, rate)
  local found = redis.call('HMGET', key, 'tokens', 'last_update')
  local tokens, last = tonumber(found[1] or ''), tonumber(found[2] or '')
  if not tokens or not last then return capacity end
  return math.min(capacity, tokens + math.max(0, now - last) * rate)
end
local function keep(key, capacity, rate, tokens)
  if tokens + 0.000001 >= capacity then
    redis.call('DEL', key)
    return
  end
  redis.call('HSET', key, 'tokens', string.format('%.6f', tokens), 'last_update', string.format('%.6f', now))
  redis.call('EXPIRE', key, math.min(math.ceil((capacity - tokens) / rate) + 60, 315360000))
end
";

/// Always a write where all have enough: a replica that only reads would let everything pass that it cannot count.
///
/// For each bucket: capacity, tokens a second, what must be there, what is taken, and whether no more than there is.
static CHECK: LazyLock<Script> = LazyLock::new(|| {
    Script::new(&format!(
        "{BUCKETS}
local levels, enough = {{}}, '1'
for i, key in ipairs(KEYS) do
  local at = 5 * (i - 1)
  levels[i] = level(key, tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]))
  if levels[i] + 0.000001 < tonumber(ARGV[at + 3]) then enough = '0' end
end
local answer = {{ enough }}
for i, key in ipairs(KEYS) do
  local at = 5 * (i - 1)
  local capacity, rate, taken = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 4])
  if ARGV[at + 5] == '1' then taken = math.min(taken, math.floor(math.max(0, levels[i] + 0.000001))) end
  if enough == '1' then keep(key, capacity, rate, levels[i] - taken) end
  answer[2 * i] = string.format('%.6f', levels[i])
  answer[2 * i + 1] = string.format('%.0f', taken)
end
return answer"
    ))
});

/// First the key of what was told last by this replica, and its number; then for each bucket capacity, tokens a second, and
/// what was spent. Keys that hold something else are passed over and counted. The number is written last: a script that
/// ends early is run again.
static SETTLE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(&format!(
        "{BUCKETS}
if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then return 0 end
local misfits = 0
for i = 2, #KEYS do
  local at = 3 * (i - 2) + 1
  local kind = redis.call('TYPE', KEYS[i])['ok']
  if kind == 'hash' or kind == 'none' then
    local capacity, rate = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    keep(KEYS[i], capacity, rate, level(KEYS[i], capacity, rate) - tonumber(ARGV[at + 3]))
  else
    misfits = misfits + 1
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', 3600)
return misfits"
    ))
});

/// A sign of life; how many replicas gave one in the last 10 s.
static BEAT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 10)
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])",
    )
});

/// Checks and charges.
pub async fn check(link: &Link, demands: &Both<Option<Demand>>) -> RedisResult<Answer> {
    let mut call = CHECK.prepare_invoke();
    let asked = || [&demands.input, &demands.output].into_iter().flatten();
    for demand in asked() {
        fills(call.key(&*demand.name.0), demand.rate);
        call.arg(demand.rate.needed(demand.kind, demand.amount));
        call.arg(demand.amount.min(u64::from(demand.rate.tokens)));
        call.arg(u8::from(demand.kind == Kind::Output));
    }
    let said: Vec<String> = link.run(&call).await?;
    let number = |at: usize| said.get(at).and_then(|text| text.parse::<f64>().ok());
    let unreadable =
        || RedisError::from((ErrorKind::UnexpectedReturnType, "a script answered something else"));
    let (mut levels, mut taken) = (Both::default(), Both::default());
    for (at, demand) in asked().enumerate() {
        *levels.get_mut(demand.kind) = number(2 * at + 1).ok_or_else(unreadable)?;
        *taken.get_mut(demand.kind) = number(2 * at + 2).ok_or_else(unreadable)? as u64;
    }
    let enough = number(0).ok_or_else(unreadable)? > 0.0;
    Ok(Answer { taken: enough.then_some(taken), levels })
}

/// Tells what was spent, once however often it is called with a number. How many keys hold something else.
pub async fn settle(link: &Link, replica: &str, number: u64, spent: &[Spent]) -> RedisResult<u64> {
    let mut call = SETTLE.key(format!("pilotfish:limits:told:{replica}"));
    call.arg(number);
    for spent in spent {
        fills(call.key(&*spent.name.0), spent.rate);
        call.arg(spent.tokens);
    }
    link.run(&call).await
}

/// Whether an error says something of a key, not of Redis.
pub fn is_of_one_key(error: &RedisError) -> bool {
    says(error, "WRONGTYPE")
}

/// Shows that this replica lives; how many do.
pub async fn beat(link: &Link, replica: &str) -> RedisResult<u32> {
    link.run(BEAT.key(REPLICAS).arg(replica)).await
}

/// This replica goes.
pub async fn leave(link: &Link, replica: &str) -> RedisResult<()> {
    let mut command = redis::cmd("ZREM");
    command.arg(REPLICAS).arg(replica);
    link.all(vec![command]).await.map(drop)
}

fn fills(call: &mut ScriptInvocation<'_>, rate: Rate) {
    call.arg(rate.capacity()).arg(rate.per_second());
}
