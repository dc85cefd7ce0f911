-- skip: note that a task run did not happen because of the lock.
-- ARGV  why, owner
-- returns how many were skipped since the last success
-- include _lease
-- include _runs
local why, owner = unpack(ARGV)
local time = call('TIME')
note('skip', time[1] * 1000 + math.floor(time[2] / 1000), 0, why, owner)
return tonumber(call('HGET', RUNS, 'skips'))
