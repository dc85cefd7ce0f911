-- release: end a lease, only for the owner's token, and hand the lock to the next waiter.
-- ARGV  token, min_hold (ms since the grant, 0 for none), once (ms from now, 0 for none), owner, ended, run, remembered
--       ended: done or failed if the lease is to be remembered (see _past.lua), else ''
--       run: id of the task run that ends with it, '' if it has none
--       remembered: ms for which a run that succeeded is (see _runs.lua), 0 if it is no run of a task
-- returns 'released', or why not: 'gone', 'taken', 'forced'
-- include _lease
local token, min_hold, once, owner, ended, run, remembered = unpack(ARGV)
local value = call('GET', LOCK)
local head = call('ZRANGE', QUEUE, 0, 0)[1]
local plain = min_hold == '0' and once == '0' and ended == ''

if value and plain and not head and string.sub(value, 1, 33) == token .. 'h' then
  call('DEL', LOCK)
  if INDEX then
    redis.pcall('ZREM', INDEX, LOCK)
  end
  return 'released'
end

-- include _grant
-- include _queue
-- include _past
if not value or not is_of(value, token) then
  return absence(value, token)
end
if state_of(value) == 'k' then
  return 'released' -- a resend: the first try has started the cooling
end

local cooling = false
if not plain then
  local ms = milliseconds(clock())
  local _, since = read(value)
  -- Not longer than min_hold from now, should the clock have been set back meanwhile.
  local left = math.min(since + min_hold - ms, min_hold)
  cooling = left > 0
  if cooling then
    local record = head and call('HGET', WAITERS, head)
    call('PEXPIRE', LOCK, left)
    call('SETRANGE', LOCK, 32, 'k')
    if INDEX then
      redis.pcall('ZADD', INDEX, ms + left, LOCK)
    end
    if record then
      -- Or the first waiter would sleep until the end that the lease had before.
      local channel, id = string.match(record, '^%d+|([^|]*)|%d+|(%x+)|')
      call('PUBLISH', channel, 'look ' .. id .. ' ' .. digits(left))
    end
  end
  if once ~= '0' then
    -- A server out of memory refuses SET as the first write of a script, but not as a later one.
    call('PEXPIRE', LOCK, cooling and left or CLAIM)
    call('SET', DONE, digits(ms) .. '|' .. owner, 'PX', once)
  end
end
if not cooling then
  pass_on(value, head)
end
if ended ~= '' then
  remember(value, ended)
end
if remembered ~= '0' then
  -- include _runs
  local ms = milliseconds(clock())
  local _, since = read(value)
  note(ended == 'done' and 'success' or 'failure', ms, ms - since, '', owner)
  if ended == 'done' and run ~= '' then
    finish(run, ms, remembered)
  end
end
return 'released'
