-- conclude: a release that leaves something behind: a time to cool, a `once`, or a note of the lease.
-- ARGV  token, id, min_hold (ms since the grant, 0 for none), once (ms from now, 0 for none), owner, ended, run,
--       recognised_for, retention
--       id: that of the lease
--       ended: done or failed if the lease is to be noted (see _past.lua), else ''
--       run: id of the task run that ends with it, '' if it has none
--       recognised_for: ms for which a duplicate is recognised (see _runs.lua), 0 if no run ends
--       retention: how long its records are kept, and how many leases, see _runs.lua too
-- returns as release does
local LOCK, QUEUE, FENCE, DONE, FORCED, PAST, FINISHED, RUNS, HELD, RAN = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _past
-- include _absence
local token, id, min_hold, once, owner, ended, run, recognised_for, retention = unpack(ARGV)
local value = call('GET', LOCK)
if not value or not is_of(value, token) or not read(value) then
  -- A late resend. If the timeline has the end of the lease, the first try was carried out, with all that
  -- is to stay behind. Else the lease has ended by itself.
  for _, entry in ipairs(redis.pcall('LRANGE', PAST, -1000, -1)) do
    if string.match(entry, '^(%x+)|%d+|%d+|%d+|' .. ended .. '|') == id and ended ~= '' then
      return 'released'
    end
  end
  return absence(value, token)
end
if state_of(value) == 'k' then
  return 'released' -- a resend: the first try has started the cooling
end

local ms = milliseconds(clock())
local _, since = read(value)
-- At most min_hold from now, in case the clock was set back meanwhile.
local left = math.min(since + min_hold - ms, min_hold)
local cooling = left > 0
if cooling then
  call('PEXPIRE', LOCK, left)
  call('SETRANGE', LOCK, 32, 'k')
  redis.pcall('ZADD', HELD, ms + left, LOCK)
  list_pause(tell_waiter(0, left))
else
  pass_on(value)
end
if once ~= '0' then
  -- A server out of memory refuses SET as the first write of a script, but not as a later one.
  call('SET', DONE, digits(ms) .. '|' .. owner, 'PX', once)
end
if ended ~= '' then
  note_past(value, ended, ms, retention)
end
if recognised_for ~= '0' then
  -- include _runs
  -- include _task_of
  redis.pcall('HDEL', RUNS, started_under()) -- the entry of this run, which has had the lock until now
  note(ended == 'done' and 'success' or 'failure', ms, ms - since, '', owner, retention)
  if ended == 'done' and run ~= '' then
    finish(task_of(run), ms, recognised_for)
  end
end
return 'released'
