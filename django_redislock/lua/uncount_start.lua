-- uncount_start: the body of a task run has ended, so count_start counts it no more.
-- ARGV  id of the lease, run (see _task_of.lua)
-- returns 1 if it was counted, else 0
local STARTS = unpack(KEYS)
-- include _lease
-- include _task_of
local id, run = unpack(ARGV)
return call('ZREM', STARTS, id .. task_of(run))
