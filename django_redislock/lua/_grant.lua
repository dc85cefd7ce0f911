-- grant: write a new lease down, and return its fence.
-- The lease of a waiter who was rung is a claim: it has a channel and only a short time.
local function grant(token, id, ttl, owner, previous, time, channel)
  local ms = time[1] * 1000 + math.floor(time[2] / 1000)
  -- The fence grows even if its record was lost (the clock has moved on) or the clock was set
  -- back (the record is still there).
  local fence = digits(math.max(time[1] * 1000000 + time[2], (tonumber(previous) or 0) + 1))
  local state, claim, px = 'h000000', '0', ttl
  if channel ~= '' then
    -- A claim's key outlives the claim, or a lapsed one would leave no trace of who let it lapse.
    state, claim, px = 'c000000', digits(ms + math.min(CLAIM, ttl)), ttl + CLAIM
  end
  local head = token .. state .. id .. '|' .. fence .. '|' .. digits(ms) .. '|' .. ttl
  call('SET', FENCE, fence, 'PX', ttl + DAY)
  call('SET', LOCK, head .. '|' .. claim .. '|' .. channel .. '|' .. owner, 'PX', px)
  if INDEX then
    redis.pcall('ZADD', INDEX, ms + px, LOCK)
    -- Leases that expired leave their entry behind; now and then is enough to drop those.
    if time[2] % 16 == 0 then
      redis.pcall('ZREMRANGEBYSCORE', INDEX, '-inf', ms - 60000)
    end
  end
  return fence
end
