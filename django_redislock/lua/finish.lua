-- finish: note how a task run ended of which no release tells, since it held a permit of many.
-- ARGV  success or failure, how long (ms), owner, id of the run or '', remembered (ms)
-- returns 1
local LOCK, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local what, lasted, owner, run, remembered = unpack(ARGV)
local ms = milliseconds(clock())
note(what, ms, tonumber(lasted), '', owner)
if what == 'success' and run ~= '' then
  finish(run, ms, remembered)
end
return 1
