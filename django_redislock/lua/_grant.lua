-- grant: the next fence, also if the clock was set back, and a new lease, written down with it.
--
-- fence    one mark for all names: 'last' -> the greatest fence that was given out
--
-- The fence of a name grows even if the mark was lost (the clock has moved on) or the clock was set
-- back (the mark is still there).

local EXACT = 2 ^ 53 -- scores are exact up to here, which as a time is the year 2255

local function next_fence(previous, us)
  previous = tonumber(previous)
  return previous and previous >= tonumber(us) and previous < EXACT and digits(previous + 1) or us
end

-- The mark, or the fence of the lease before, if that is greater: the mark was lost. The lease before may not be the
-- last one that was granted: of several permits, another may have a greater fence.
local function last_fence(of_lease)
  return math.max(tonumber(call('ZSCORE', FENCE, 'last') or 0), tonumber(of_lease or 0))
end

-- GT: a lease that is handed over may have a smaller fence than a lease of another name.
local function raise_mark(fence)
  redis.pcall('ZADD', FENCE, 'GT', fence, 'last')
end

-- With a *channel* the lease is handed over: the waiter that was rung there must confirm it soon, or *within*
-- so many ms.
local function grant(token, id, ttl, renews, owner, fence, us, channel, within)
  local ms = string.sub(us, 1, -4)
  local state, confirm_by, px = 'h', '0', ttl
  if channel ~= '' then
    -- The key outlives that time, or nobody would know which waiter has let it pass.
    state, confirm_by, px = 'c', digits(ms + math.min(within or CONFIRM_WITHIN, ttl)), ttl + CONFIRM_WITHIN
  end
  local head = token .. state .. renews .. '00000' .. id .. '|' .. fence .. '|' .. ms .. '|' .. ttl
  call('SET', LOCK, head .. '|' .. confirm_by .. '|' .. channel .. '|' .. owner, 'PX', px)
  redis.pcall('ZADD', HELD, ms + px, LOCK)
  -- Expired leases leave their entries behind; one grant in ten drops them.
  if string.sub(us, -1) == '0' then
    redis.pcall('ZREMRANGEBYSCORE', HELD, '-inf', ms - 60000)
  end
end
