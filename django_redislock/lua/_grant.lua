-- grant: the next fence, even if the clock was set back, and a new lease with it.
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

-- Returns a fence that is greater than all before, and raises the mark to it. It is the server's time, unless the
-- clock was set back, or a quorum has raised the mark. *of_lease* is the fence of the lease before, in case the mark
-- is lost. It need not be the greatest so far: the lease of another permit may have a greater one.
local function new_fence(us, of_lease)
  of_lease = tonumber(of_lease) or 0
  if tonumber(us) > of_lease and redis.pcall('ZADD', FENCE, 'GT', 'CH', us, 'last') == 1 then
    return us
  end
  local fence = next_fence(math.max(tonumber(call('ZSCORE', FENCE, 'last')) or 0, of_lease), us)
  redis.pcall('ZADD', FENCE, 'GT', fence, 'last')
  return fence
end

-- With a *channel* the lease is handed over: the waiter that was rung there must confirm it, in CONFIRM_WITHIN
-- or in *within* ms.
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
