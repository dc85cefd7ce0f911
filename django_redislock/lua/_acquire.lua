-- acquire: whether the asker is granted LOCK; and if not, how it waits.
--
-- limit    how many permits the lock has, for the record of a waiter; '' if one
-- permit   what is answered behind the fence, if granted: ' ' and which permit it is; '' if the
--          lock has one
-- pause_left  ms until a waiting pause no longer keeps the other permits from a waiter, or until a replaced holder
--          must have ended; else nil
-- popped   {token, ticket} of the asker, if it came first in the queue and was taken out of it; else nil
-- refusal  what is answered if the asker is not to wait: 'busy', or 'own' if another delivery of its task run has it

local value = redis.pcall('GET', LOCK)
local done_before, started, retention
if markers ~= '' then
  -- include _done_markers
  -- include _runs
  done_before = already_done(markers)
  retention = string.match(markers, '^.([^|]*)|')
  started = retention ~= '' and begin
end

if not (value or done_before or popped) and call('EXISTS', QUEUE) == 0 then
  local us = clock()
  local fence = new_fence(us)
  grant(token, id, ttl, renews, owner, fence, us, '')
  if started then
    started(id, string.sub(us, 1, -4), owner, retention)
  end
  return fence .. permit
end

-- Lists a key that keeps the lock busy, though no grant has put it into the index.
local function list_until(score)
  redis.pcall('ZADD', HELD, score, LOCK)
end

if type(value) == 'table' then
  list_until('+inf') -- of another type, most likely
  return value
end

-- include _queue
-- include _past
-- A waiter relies on its hand-over only after it has asked, so that can end here. A lease that was granted before is
-- in use: this try comes late, or once more, and with a limit others have done the work meanwhile.
local mine = done_before and value and is_of(value, token) and state_of(value)
if done_before and mine ~= 'h' then
  if mine == 'c' then
    pass_on(value)
  end
  dequeue(token)
  return done_before
end

local us = clock()
local ms = milliseconds(us)
local left, previous
if value then
  local state = state_of(value)
  local fence, since, confirm_by, rung_at = read(value)
  if fence and is_of(value, token) and state ~= 'k' then
    if state == 'c' then
      call('PEXPIRE', LOCK, ttl)
      call('SETRANGE', LOCK, 32, 'h')
    else
      call('PEXPIRE', LOCK, ttl, 'GT') -- a late resend must not shorten a lease that is longer by now
    end
    redis.pcall('ZADD', HELD, 'GT', ms + ttl, LOCK)
    if started then
      started(id, since, owner, retention)
    end
    return fence .. permit
  end
  left = call('PTTL', LOCK)
  if left == -1 then
    list_until('+inf')
    return { 'endless' }
  end
  note_met(value, ms)
  if not confirm_by then
    list_until(digits(ms + left)) -- not ours
    list_pause(call('ZRANGE', QUEUE, 0, 1)[2])
  elseif state == 'c' then
    left = math.min(left, confirm_by - ms)
    if left <= 0 then
      -- Not confirmed: the process that was rung may have stopped. All its waiters are passed over
      -- until they look again, so it delays the others once, not once for each waiter.
      local process = string.match(rung_at, '^(.*):')
      if process ~= string.match(channel, '^(.*):') then
        for _, member in ipairs(call('ZRANGE', QUEUE, 0, -1)) do
          if string.match(member, '^[^|]+|%d+|([^|]*):%d+|') == process then
            call('ZREM', QUEUE, string.sub(member, 1, 32), member)
          end
        end
      end
      previous, left = fence, nil
    end
  end
end

if not left then
  local next_one, its_ticket = hand_over(popped or pop_waiter(), previous, token)
  if next_one == nil or next_one == token then
    local fence = new_fence(us, previous)
    grant(token, id, ttl, renews, its_ticket and with_wait(owner, its_ticket, us) or owner, fence, us, '')
    if started then
      started(id, ms, owner, retention)
    end
    return fence .. permit
  end
  value = call('GET', LOCK)
  left = is_pause(value) and call('PTTL', LOCK) or CONFIRM_WITHIN
end

if mode == 'pause' then -- one at a time
  local first, record = unpack(call('ZRANGE', QUEUE, 0, 1))
  if is_pause(value) then
    mode = 'try'
  elseif first and first ~= token and is_pause(first) then
    local expiry, _, lasts, _, its_id, its_owner = string.match(record or '', RECORD)
    if expiry and tonumber(expiry) > ms then
      mode, left = 'try', expiry - ms
      value = first .. 'h-00000' .. its_id .. '|0|' .. digits(ms) .. '|' .. lasts .. '|0||' .. its_owner
    else
      dequeue(first)
    end
  end
end

if mode ~= 'queue' and mode ~= 'pause' then
  call('PEXPIRE', QUEUE, 1, 'GT') -- as in _absence.lua: a former master must not say so
  if mode == 'last' then
    dequeue(token)
  end
  if state_of(value) == 'c' then
    left = math.max(call('PTTL', LOCK) - CONFIRM_WITHIN, 1) -- of the lease, as look shows it
  end
  return { refusal, left, string.sub(value, 1, SIGHT), ms }
end

local queued_before, lasts = call('ZSCORE', QUEUE, token), WAITER_TTL
if mode == 'pause' then
  lasts, channel = tonumber(ttl), ''
  redis.pcall('ZADD', HELD, 'GT', ms + lasts, LOCK) -- the entry of a holder that dies would end sooner
end
if queued_before then
  ticket = digits(queued_before)
elseif mode == 'pause' then
  ticket = '-' .. us
elseif ticket == '0' then
  -- Not the bare clock: when it is set back, newcomers would overtake.
  local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
  ticket = next_fence(last, us)
end
local record = table.concat({ token, digits(ms + lasts), channel, ttl, renews .. limit, id, owner }, '|')
call('ZADD', QUEUE, ticket, token, ticket, record)
if queued_before then -- not before: without members the key would be gone, and a slot on its way gets no new keys
  remove(token, ticket, record)
end
if mode == 'pause' and limit_of(call('ZRANGE', QUEUE, 2, 3)[2]) > 1 then
  tell_waiter(1, math.min(left, lasts)) -- it may have another permit then
end
-- The queue lives as long as a pause in it.
if call('PEXPIRE', QUEUE, lasts, 'GT') == 0 then
  call('PEXPIRE', QUEUE, lasts, 'NX')
end
local its_owner = string.match(string.sub(value, 56, SIGHT), '^|%d+|%d+|%d+|%d+|[^|]*|(.*)$') or ''
return { 'queued', ticket, math.min(left, pause_left or left), us, queued_before and 0 or 1, its_owner, pause_left }
