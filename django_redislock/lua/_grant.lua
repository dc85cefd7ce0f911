-- grant: write a new lease down, after its fence.

-- A fence grows even if its record was lost (the clock has moved on) or the clock was set back
-- (the record is still there).
local function next_fence(previous, us)
  previous = tonumber(previous)
  return previous and previous >= tonumber(us) and digits(previous + 1) or us
end

-- The lease of a waiter who was rung is a claim: it has a channel and only a short time.
local function grant(token, id, ttl, renews, owner, fence, us, channel)
  local ms = string.sub(us, 1, -4)
  local state, claim, px = 'h', '0', ttl
  if channel ~= '' then
    -- A claim's key outlives the claim, or a lapsed one would leave no trace of who let it lapse.
    state, claim, px = 'c', digits(ms + math.min(CLAIM, ttl)), ttl + CLAIM
  end
  local head = token .. state .. renews .. '00000' .. id .. '|' .. fence .. '|' .. ms .. '|' .. ttl
  call('SET', LOCK, head .. '|' .. claim .. '|' .. channel .. '|' .. owner, 'PX', px)
  if HELD then
    redis.pcall('ZADD', HELD, ms + px, LOCK)
    -- Leases that expired leave their entry behind; now and then is enough to drop those.
    if string.sub(us, -1) == '0' then
      redis.pcall('ZREMRANGEBYSCORE', HELD, '-inf', ms - 60000)
    end
  end
end
