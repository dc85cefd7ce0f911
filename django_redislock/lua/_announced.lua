-- announced: the call that waits in the broker's queue and stands for others, see announce.lua.
--
-- runs      queued, terms, asked, task, way: see _runs.lua
-- calls     the lock keys with such a call -> until when (ms) it stands for others, for listings

-- Lets the call *id* stand for others, for *ttl* ms from *ms* on.
local function stand(id, ms, ttl, terms)
  call('HSET', RUNS, 'queued', digits(ms + ttl) .. '|' .. id)
  call('HSET', RUNS, 'terms', terms)
  call('PEXPIRE', RUNS, digits(math.max(call('PTTL', RUNS), ttl)))
  redis.pcall('ZREMRANGEBYSCORE', CALLS, '-inf', digits(ms))
  redis.pcall('ZADD', CALLS, digits(ms + ttl), LOCK)
  local left = redis.pcall('PTTL', CALLS)
  redis.pcall('PEXPIRE', CALLS, digits(math.max(tonumber(left) or 0, ttl)))
end

-- Returns the id of the call that stands for others, also if it is over.
local function standing()
  return string.match(call('HGET', RUNS, 'queued') or '', '^%d+|(.*)$')
end
