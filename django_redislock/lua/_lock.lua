-- lock: how a lock is written down, and how it passes from one owner to the next.
-- No operation of its own: scripts.py puts this file before each of the others.
--
-- KEYS of every operation: lock queue waiters fence done forced [index]   (see keys.py)
-- ARGV of every operation: its own, then the channel on which the asking connection is rung or ''
--
-- lock     token(32) state(1) renewals(6) id(16) "|" fence "|" since "|" claim "|" channel "|" owner
--          state: h held; c claimed (handed over, not yet confirmed); k kept by min_hold (cooling)
--          since: server time of the grant in ms; claim: server time in ms at which a claim lapses
-- waiters  expiry(ms) "|" channel "|" ttl(ms) "|" id "|" owner
--
-- Scripts do not roll back, so every read that can fail comes before the first write. The index
-- is only a hint for listings: trouble with it (pcall) never fails an operation on the lock.

local call = redis.call
local LOCK, QUEUE, WAITERS, FENCE, DONE, FORCED, INDEX = unpack(KEYS)
local CLAIM = 1000 -- ms a handed-over lease waits for its owner's confirmation
local PATIENCE = 6000 -- ms a waiter's entry lives without a look; a waiter looks every 2000 ms
local DAY = 86400000 -- ms the fence's record outlives the lease

-- Server time in us and in ms.
local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2], time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lua prints large numbers as 1.7e+15; the server wants digits.
local function digits(number)
  return string.format('%.0f', number)
end

local function is_of(value, token)
  return string.sub(value, 1, 32) == token
end

local function state_of(value)
  return string.sub(value, 33, 33)
end

-- fence, since, claim, channel of a lease; nothing if the value is not one of ours.
local function read(value)
  return string.match(value, '^|(%d+)|(%d+)|(%d+)|([^|]*)|', 56)
end

-- Writes a new lease down, and returns its fence.
local function grant(token, state, id, ttl, claim, channel, owner, us, ms, previous)
  -- The fence grows even if its record was lost (the clock has moved on) or the clock was set
  -- back (the record is still there).
  local fence = digits(math.max(us, (tonumber(previous) or 0) + 1))
  -- A claim's key outlives the claim, or a lapsed one would leave no trace of who let it lapse.
  local px = claim > 0 and ttl + CLAIM or ttl
  local head = token .. state .. '000000' .. id .. '|' .. fence .. '|' .. digits(ms)
  call('SET', FENCE, fence, 'PX', digits(ttl + DAY))
  call('SET', LOCK, head .. '|' .. digits(claim) .. '|' .. channel .. '|' .. owner, 'PX', px)
  if INDEX then
    redis.pcall('ZADD', INDEX, ms + px, LOCK)
  end
  return fence
end

local function dequeue(token)
  call('ZREM', QUEUE, token)
  call('HDEL', WAITERS, token)
end

local function first_waiter()
  return call('ZRANGE', QUEUE, 0, 0)[1]
end

-- Grants the lock to the first waiter who can be rung, as a claim, and returns that token.
-- If the first is *me*, who is awake and asking, returns it without a grant; nil without waiters.
local function hand_over(token, previous, me)
  while token and token ~= me do
    local us, ms = clock()
    local record = call('HGET', WAITERS, token) or ''
    local expiry, channel, ttl, id, owner =
      string.match(record, '^(%d+)|([^|]*)|(%d+)|(%x+)|(.*)$')
    local fence = digits(math.max(us, (tonumber(previous) or 0) + 1))
    -- A PUBLISH that nobody receives tells of a killed waiter at once.
    local rung = expiry
      and tonumber(expiry) > ms
      and call('PUBLISH', channel, 'granted ' .. id .. ' ' .. fence .. ' ' .. digits(us)) > 0
    dequeue(token)
    if rung then
      ttl = tonumber(ttl)
      grant(token, 'c', id, ttl, ms + math.min(CLAIM, ttl), channel, owner, us, ms, previous)
      return token
    end
    token = first_waiter()
  end
  return token
end

-- Ends the current lease: the next waiter has the lock, or nobody has.
local function pass_on(value)
  local head = first_waiter()
  if not (head and hand_over(head, (read(value)))) then
    call('DEL', LOCK)
    if INDEX then
      redis.pcall('ZREM', INDEX, LOCK)
    end
  end
end

-- Why the token does not hold the lock.
local function absence(value, token)
  if call('GET', FORCED) == token then
    return 'forced'
  end
  return value and not is_of(value, token) and 'taken' or 'gone'
end
