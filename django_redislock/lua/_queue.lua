-- queue: how a lock passes from one owner to the next.
--
-- A lease is handed over unconfirmed. Until an answer confirms it, its new owner relies on it for less than
-- CONFIRM_WITHIN (take_up in rules/flows.py); after that time, the next acquire may pass the lock on.
--
-- queue    the waiters. Each has two members, both with its ticket as their score: its token, and its record, which
--          begins so too: token(32) "|" expiry(ms) "|" channel "|" ttl(ms) "|" renews limit "|" id "|" owner
--          limit: how many permits the lock has for this waiter; nothing for one
--          With equal scores the shorter member comes first, so a waiter's token stands before its record.
-- pause    the lease by which an operator keeps a lock from everybody. While another lease is in its way, it stands
--          in the queue. Its token begins with "hold", its ticket is less than 0, its expiry is the end of the pause,
--          and its channel is ''. Nobody confirms, renews or releases it.
-- permits  a lock with a limit has several leases, and LOCK is one of them: see acquire_permit.lua. A pause is on the
--          first, and keeps all of them from everybody.

local RECORD = '^[^|]+|(%d+)|([^|]*)|(%d+)|([r-])%d*|(%x+)|(.*)$'

-- Whether a lease, or a member of the queue, is that of *token*.
local function is_of(value, token)
  return string.sub(value, 1, 32) == token
end

-- Whether a lease, or a member of the queue, is a pause.
local function is_pause(value)
  return string.sub(value, 1, 4) == 'hold'
end

local function state_of(value)
  return string.sub(value, 33, 33)
end

-- include _ring

-- Returns fence, since, confirm_by and channel of a lease; nothing if the value is not ours.
local function read(value)
  if string.match(value, '^[hck][r-]%d%d%d%d%d%x+()|', 33) == 56 then
    return string.match(value, '^|(%d+)|(%d+)|%d+|(%d+)|([^|]*)|', 56)
  end
end

-- Tells the waiter behind *before* others that the lock ends in *left* ms. Else it would sleep until the time that
-- it was told last. Returns the waiter's record, if there is one.
local function tell_waiter(before, left)
  local record = call('ZRANGE', QUEUE, 2 * before, 2 * before + 1)[2]
  local _, channel, _, _, id = string.match(record or '', RECORD)
  if channel and channel ~= '' then
    ring(channel, 'look ' .. id .. ' ' .. digits(left))
  end
  return record
end

local function limit_of(record)
  return tonumber(string.match(record or '', '^[^|]+|%d+|[^|]*|%d+|[r-](%d+)|') or 1)
end

-- Which permit LOCK is, if it is not the first.
local function later_permit()
  return string.match(LOCK, '}:lock#(%d+)$')
end

-- Lists the lock to the end of a pause that comes first, whose *record* this is: the lease before it may end sooner.
local function list_pause(record)
  if record and is_pause(record) and not later_permit() then
    redis.pcall('ZADD', HELD, 'GT', string.match(record, RECORD) or 0, LOCK)
  end
end

-- What stands behind the fence of a grant: ' 2' for the second permit, nothing for the first.
local function of_permit()
  local permit = later_permit()
  return permit and ' ' .. permit or ''
end

-- Takes the first waiter out of the queue. Returns {token, ticket, record, ticket}; {} if nobody waits; {false} if no
-- waiter may have this permit: the first one has a lower limit, or an operator's pause is there, or comes first.
local function pop_waiter()
  local permit = later_permit()
  if permit then
    local first, record = unpack(call('ZRANGE', QUEUE, 0, 1))
    local value = redis.pcall('GET', (string.gsub(LOCK, '#%d+$', ''))) -- of another type, perhaps
    local held_back = type(value) == 'string' and is_pause(value)
    if first and (held_back or is_pause(first) or limit_of(record) < tonumber(permit)) then
      return { false }
    end
  end
  return call('ZPOPMIN', QUEUE, 2)
end

-- Takes out of the queue what a waiter has there at its ticket. *record*: the one that stays, with the token.
local function remove(token, ticket, record)
  for _, member in ipairs(call('ZRANGE', QUEUE, ticket, ticket, 'BYSCORE')) do
    if is_of(member, token) and not (record and (member == token or member == record)) then
      call('ZREM', QUEUE, member)
    end
  end
end

-- Takes a waiter out of the queue, if it is there.
local function dequeue(token)
  local ticket = call('ZSCORE', QUEUE, token)
  if ticket then
    remove(token, ticket)
  end
end

-- Returns *owner*. If it has queued for a second or longer, this text says for how long (s), for the timeline.
local function with_wait(owner, ticket, us)
  local waited = (us - ticket) / 1000000
  if waited >= 0.9995 and tonumber(ticket) > 0 and string.sub(owner, 1, 2) == '{"' then -- no pause
    return '{"waited":' .. string.format('%.3f', waited) .. ',' .. string.sub(owner, 2)
  end
  return owner
end

-- Grants the lock to *first*, or to the next waiter if *first* cannot be rung. The grant is unconfirmed, unless it is
-- a pause. Returns the token, nil without waiters, or false if no waiter may have the lock. If *me* comes first, it is
-- awake and asking: returns it and its ticket, and grants nothing. Each waiter is taken out of the queue before it is
-- rung: a server that accepts no writes refuses the first step, and would allow the second.
local function hand_over(first, previous, me)
  local token, ticket, record = unpack(first)
  while token and token ~= me do
    local us = clock()
    local expiry, channel, ttl, renews, id, owner = string.match(record or '', RECORD)
    -- If nobody receives the ring, the waiter was killed. The ring tells the waiter its fence, and the
    -- server time of the grant.
    local fence = new_fence(us, previous)
    local left = (tonumber(expiry) or 0) - milliseconds(us)
    local held_back = left > 0 and is_pause(token)
    if held_back or left > 0 and ring(channel, 'granted ' .. id .. ' ' .. fence .. ' ' .. us .. of_permit()) > 0 then
      if held_back then
        ttl, channel = digits(left), ''
      else
        owner = with_wait(owner, ticket, us)
      end
      grant(token, id, ttl, renews, owner, fence, us, channel)
      return token
    end
    token, ticket, record = unpack(pop_waiter())
  end
  return token, ticket
end

-- Ends the current lease: the next waiter has the lock, or nobody has. *first*: that waiter, if popped already.
local function pass_on(value, first)
  if not hand_over(first or pop_waiter(), (read(value))) then
    call('DEL', LOCK)
    redis.pcall('ZREM', HELD, LOCK)
  end
end
