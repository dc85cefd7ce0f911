-- requeue: keep a task run announced that goes back into the broker's queue.
-- ARGV  id of the task, ttl (ms)
-- returns ms since it last stood for another call that was made; -1 if it has not, or if another
--         run is announced by now, or this one was retracted because a copy of it has started
local LOCK, RUNS, CALLS = unpack(KEYS)
-- include _lease
-- include _last_call
-- include _announced
local id, ttl = unpack(ARGV)
local ms = milliseconds(clock())
local arguments = last_call(id)
if arguments then
  keep_last_call(id, ms, ttl + DAY, arguments)
end
if standing() ~= id then
  return -1
end
-- It runs no later than another call would: the lock that keeps it from running keeps all others, too.
local its_end = string.match(call('HGET', RUNS, 'terms') or '', '^%d+|(%d*)') or ''
stand(id, ms, ttl, '0|' .. its_end)
local asked = call('HGET', RUNS, 'asked')
return asked and ms - asked or -1
