-- runs: what became of the task runs under this lock.
-- ARGV  -
-- returns {server time in ms, success or '', failure or '', skip or '', skips since the last success}; see _runs.lua
local RUNS = unpack(KEYS)
-- include _lease
local found = redis.pcall('HMGET', RUNS, 'success', 'failure', 'skip', 'skips')
return {
  digits(milliseconds(clock())),
  found[1] or '',
  found[2] or '',
  found[3] or '',
  tonumber(found[4] or 0) or 0,
}
