-- queue: how a lock passes from one owner to the next.
--
-- queue    the waiters' tokens by ticket
-- waiters  token -> expiry(ms) "|" channel "|" ttl(ms) "|" renews "|" id "|" owner

local function is_of(value, token)
  return string.sub(value, 1, 32) == token
end

local function state_of(value)
  return string.sub(value, 33, 33)
end

-- Tells those who listen on *channel*, and returns how many that are. On a cluster it has the hash
-- tag of the keys: there a PUBLISH would go to all nodes, and count only who is connected to this one.
-- Replicas are not told: who listens to one that was the master before is not counted here, and would
-- take up what is granted to somebody else. (The bus of a cluster tells them all the same; but there a
-- master that is none any more has unsubscribed everybody.)
local function ring(channel, words)
  redis.set_repl(redis.REPL_NONE)
  local heard
  if string.find(channel, '{', 1, true) then
    heard = call('SPUBLISH', channel, words)
  else
    heard = call('PUBLISH', channel, words)
  end
  redis.set_repl(redis.REPL_ALL)
  return heard
end

-- fence, since, claim, channel of a lease; nothing if the value is not one of ours.
local function read(value)
  if string.match(value, '^[hck][r-]%d%d%d%d%d%x+()|', 33) == 56 then
    return string.match(value, '^|(%d+)|(%d+)|%d+|(%d+)|([^|]*)|', 56)
  end
end

local function first_waiter()
  return call('ZRANGE', QUEUE, 0, 0)[1]
end

local function dequeue(token)
  call('ZREM', QUEUE, token)
  call('HDEL', WAITERS, token)
end

-- Grants the lock to *token*, the first waiter, or to the next one who can be rung, as a claim, and returns that token.
-- If the first is *me*, who is awake and asking, returns it without a grant; nil without waiters.
local function hand_over(token, previous, me)
  while token and token ~= me do
    local us = clock()
    local record = call('HGET', WAITERS, token) or ''
    local expiry, channel, ttl, renews, id, owner =
      string.match(record, '^(%d+)|([^|]*)|(%d+)|([r-])|(%x+)|(.*)$')
    -- A ring that nobody receives tells of a killed waiter at once. The bell brings the server
    -- time of the grant; the waiter learns the fence from it too.
    local fence = next_fence(previous, us)
    -- A server that accepts no writes would let PUBLISH pass, and refuses this.
    call('PEXPIRE', QUEUE, WAITER_TTL)
    local rung = expiry
      and tonumber(expiry) > milliseconds(us)
      and ring(channel, 'granted ' .. id .. ' ' .. fence .. ' ' .. us) > 0
    dequeue(token)
    if rung then
      raise_mark(fence)
      grant(token, id, ttl, renews, owner, fence, us, channel)
      return token
    end
    token = first_waiter()
  end
  return token
end

-- Ends the current lease: the next waiter has the lock, or nobody has.
local function pass_on(value, head)
  -- What is not ours tells no fence.
  if not (head and hand_over(head, read(value) or call('ZSCORE', FENCE, 'last'))) then
    call('DEL', LOCK)
    if HELD then
      redis.pcall('ZREM', HELD, LOCK)
    end
  end
end
