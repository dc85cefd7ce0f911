-- runs: what became of the task runs under this lock.
-- ARGV  -
-- returns {server time in ms, success or '', failure or '', skip or '', skips since the last success}; see _runs.lua
local RUNS = unpack(KEYS)
-- include _lease
local found = redis.pcall('HMGET', RUNS, 'success', 'failure', 'skip', 'skips')
local SIGHT = 8192 -- bytes of an entry that are answered, as in _queue.lua
return {
  digits(milliseconds(clock())),
  string.sub(found[1] or '', 1, SIGHT),
  string.sub(found[2] or '', 1, SIGHT),
  string.sub(found[3] or '', 1, SIGHT),
  tonumber(found[4] or 0) or 0,
}
