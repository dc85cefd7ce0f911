-- uncount_start: the body of a task run has ended, so count_start counts it no more.
-- ARGV  id of the lease, run
-- returns 1 if it was counted, else 0
local STARTS = unpack(KEYS)
-- include _lease
local id, run = unpack(ARGV)
return call('ZREM', STARTS, id .. run)
