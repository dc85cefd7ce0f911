-- runs: what became of the task runs under this lock.
-- ARGV  -
-- returns {server time in ms, success or '', failure or '', skip or '', skips since the last success}; see _runs.lua
-- include _lease
local time = call('TIME')
local found = call('HMGET', RUNS, 'success', 'failure', 'skip', 'skips')
return {
  digits(time[1] * 1000 + math.floor(time[2] / 1000)),
  found[1] or '',
  found[2] or '',
  found[3] or '',
  tonumber(found[4] or 0),
}
