-- take_start: one start under a rate, now or at the time that is answered.
--
-- A waiter has its start from when it comes, so nobody overtakes it, and it asks again only when its start is due.
-- This is the generic cell rate algorithm, as a virtual schedule (ITU-T I.371, annex A): a start is over *every* us
-- after the one before, or after now if that is later; and it is due *burst* times *every* before it is over.
-- Waiters that come late would start together. So the same algorithm runs over the starts that were made, with as many
-- more at once as are due in the time for which a waiter may be late: LATE, or twice *every* if that is longer. Those
-- that are later have half of it, and leave the other half to those that are on time.
--
-- ARGV  token, id, claimed, mode, patience, every, burst, owner, channel
--       claimed: the token by which an earlier acquire of this task run has reserved a start, or ''
--       mode: try, queue (wait for it), reserve (come back for it), last (give it up if it is not due)
--       patience: ms until a waiter's start is due, at most
-- returns the fence 0, if the start may be made now; or
--         {'queued', when it is over in us, ms until it is due, server time in us, 1 if newly queued}
--         {'early', ms until it is due or would be, of the last start its owner, server time in ms}; or of a pause
--         {'own', ms until it ends, value of lock or its beginning, server time in ms}
local LOCK, RATE, HELD = unpack(KEYS)
-- include _lease
local token, id, claimed, mode, patience, every, burst, owner, channel = unpack(ARGV)
local LATE = 500000 -- us
-- include _starts
-- include _give_back
local us = clock()
local now = tonumber(us)
local pause = redis.pcall('GET', LOCK)
if type(pause) == 'string' and string.sub(pause, 1, 4) == 'hold' then
  call('PEXPIRE', RATE, 1, 'GT') -- as below
  -- The asker waits no longer.
  for _, one in ipairs({ token, claimed }) do
    local its_over = tonumber(call('ZSCORE', RATE, one))
    if its_over and is_waited_for(one, digits(its_over)) then
      give_back(one, its_over, every)
    end
  end
  return { 'own', call('PTTL', LOCK), string.sub(pause, 1, SIGHT), milliseconds(us) }
end

local busy_until = tonumber(call('ZREVRANGE', RATE, 0, 0, 'WITHSCORES')[2] or 0)
if busy_until > now and busy_until - now > call('ZCARD', RATE) * every then
  -- All starts together cannot take so long: the clock was set back, or starts were rarer before. Move them, and
  -- ring their waiters: a late one would start together with the next.
  local members, starts = call('ZRANGE', RATE, 1, '+inf', 'BYSCORE', 'WITHSCORES'), 0
  for i = 1, #members, 2 do
    starts = starts + (#members[i] == 32 and 1 or 0)
  end
  local moved = busy_until - now - starts * every
  for i = 1, #members, 2 do
    local its_over = members[i + 1] - moved
    call('ZADD', RATE, digits(its_over), members[i])
    local its_every, its_burst, rung_at, its_id = string.match(members[i], WAITER)
    if its_id and rung_at ~= '' then
      local its_left = math.max(its_over - its_burst * its_every - now, 0)
      ring(rung_at, 'look ' .. its_id .. ' ' .. digits(math.ceil(its_left / 1000)))
    end
  end
  busy_until = busy_until - moved
end

local may_be_late = math.max(2 * every, LATE)
local _, _, _, _, _, last_owner, made = last_start()
if made > now + burst * every + may_be_late then
  made = now + burst * every + may_be_late -- the clock was set back, or starts were rarer before: all is used up
  keep_made(made)
end
local room_in = made - (burst - 1) * every - may_be_late - now
local known, over = token, call('ZSCORE', RATE, token)
if not over and claimed ~= '' then
  known, over = claimed, call('ZSCORE', RATE, claimed)
end
over = tonumber(over)
local was_made = over and not is_waited_for(known, digits(over))
local late_by = over and not was_made and now - (over - burst * every) or 0
if late_by > may_be_late and room_in > -may_be_late / 2 then
  -- There is no room for it: it queues again.
  give_back(known, over, every)
  over, busy_until = nil, tonumber(call('ZREVRANGE', RATE, 0, 0, 'WITHSCORES')[2] or 0)
end

local is_new = not over
over = over or math.max(busy_until, now) + every
local left = math.max(over - burst * every - now, room_in)

-- Adds members with these scores. The rate stays as long as its last start, and is listed as long.
local function add(...)
  local last = math.max(busy_until, over, made)
  call('ZADD', RATE, ...)
  call('PEXPIRE', RATE, digits((last - now + KEPT_FOR) / 1000))
  redis.pcall('ZADD', HELD, 'GT', digits(last / 1000), LOCK)
  if string.sub(us, -1) == '0' then -- as in _grant.lua
    redis.pcall('ZREMRANGEBYSCORE', HELD, '-inf', milliseconds(us) - 60000)
  end
end

if left <= 0 or was_made then
  if not is_new then
    drop(known, digits(over))
  end
  call('ZREMRANGEBYSCORE', RATE, '-inf', digits(now - math.max(KEPT_FOR, may_be_late)))
  if not was_made then
    over, made = math.max(over, now), math.max(made, now) + every -- a late one is known to its resends as long
  end
  add(digits(over), token, 0, table.concat({ every, burst, digits(milliseconds(us)), id, digits(made), owner }, '|'))
  return '0'
end

local left_ms = math.ceil(left / 1000)
local waits = mode == 'queue' and (not is_new or left_ms <= tonumber(patience))
if waits or mode == 'reserve' then
  if not is_new then
    drop(known, digits(over))
  end
  local rung_at = waits and channel or ''
  add(digits(over), token, digits(over), table.concat({ token, every, burst, rung_at, id, us, owner }, '|'))
end
if waits then
  return { 'queued', digits(over), left_ms, us, is_new and 1 or 0 }
end
if not is_new and mode == 'last' then
  give_back(known, over, every)
end
-- Changes nothing, but a server that accepts no writes refuses it: a former master must not say so.
call('PEXPIRE', RATE, 1, 'GT')
return { 'early', left_ms, last_owner or '', milliseconds(us) }
