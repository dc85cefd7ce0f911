-- retract: end the announcement of a task run, which has started, or never will.
-- ARGV  id of the task, ms for which to keep its arguments, should it be delivered again; 0 or nothing: not at all
-- returns the arguments that it is to run with in place of its own, see announce.lua; '' for its own
local LOCK, RUNS, CALLS = unpack(KEYS)
-- include _lease
-- include _last_call
-- include _announced
local id, keep = unpack(ARGV)
keep = tonumber(keep or 0)
local arguments = last_call(id)
if standing() == id then
  call('HDEL', RUNS, 'queued', 'asked', 'terms', 'task', 'way')
  redis.pcall('ZREM', CALLS, LOCK)
end
if arguments and keep > 0 then
  keep_last_call(id, milliseconds(clock()), keep, arguments)
elseif arguments then
  call('HDEL', RUNS, 'last:' .. id)
end
return arguments or ''
