-- conclude: a release that leaves something behind: a time to cool, a `once`, or a note of the lease.
-- ARGV  token, id, min_hold (ms since the grant, 0 for none), once (ms from now, 0 for none), owner, ended, run,
--       recognised_for, retention
--       id: that of the lease
--       ended: done, failed or replaced if the lease is to be noted (see _past.lua), else ''. If replaced, its run
--       is no success and no failure.
--       run: id of the task run that ends with it, '' if it has none
--       recognised_for: ms for which a duplicate is recognised (see _runs.lua), 0 if no run ends
--       retention: how long its records are kept, and how many leases, see _runs.lua too
-- returns as release does
local LOCK, QUEUE, FENCE, DONE, FORCED, PAST, FINISHED, RUNS, HELD, RAN = unpack(KEYS)
-- include _lease
local token, id, min_hold, once, owner, ended, run, recognised_for, retention = unpack(ARGV)
local value = call('GET', LOCK)
local now = string.sub(clock(), 1, -4) -- ms
local since, first, is_over

if value and min_hold == '0' and string.sub(value, 1, 33) == token .. 'h' then
  since = string.match(value, '^|%d+|(%d+)|', 56)
end
if since then
  -- include _end
end

if not is_over then
  -- include _grant
  -- include _queue
  -- include _absence
  if not first and not (value and is_of(value, token) and read(value)) then
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
  since = since or select(2, read(value))
  -- At most min_hold from now, in case the clock was set back meanwhile.
  local left = math.min(since + min_hold - now, min_hold)
  if left > 0 then
    call('PEXPIRE', LOCK, left)
    call('SETRANGE', LOCK, 32, 'k')
    redis.pcall('ZADD', HELD, now + left, LOCK)
    list_pause(tell_waiter(0, left))
  else
    pass_on(value, first)
  end
end
if once ~= '0' then
  -- A server out of memory refuses SET as the first write of a script, but not as a later one.
  call('SET', DONE, now .. '|' .. owner, 'PX', once)
end
if ended ~= '' then
  -- include _past
  note_past(value, ended, now, retention)
end
if recognised_for ~= '0' or ended == 'replaced' then
  -- include _runs
  if ended == 'replaced' then
    forget(id)
  else
    note(ended == 'done' and 'success' or 'failure', now, now - since, '', owner, retention, field_of_run())
  end
  if ended == 'done' and run ~= '' then
    -- include _task_of
    finish(task_of(run), now, recognised_for)
  end
end
return 'released'
