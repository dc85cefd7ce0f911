-- finish: note how a task run ended of which no release tells, since it held a permit of many.
-- ARGV  success or failure, how long (ms), owner, id of the run or '', remembered (ms), "#" and number
--       of the permit, id of its lease
-- returns 1
local LOCK, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local what, lasted, owner, run, remembered, permit, id = unpack(ARGV)
local ms = milliseconds(clock())
forget(permit, id)
note(what, ms, tonumber(lasted), '', owner)
if what == 'success' and run ~= '' then
  finish(run, ms, remembered)
end
return 1
