-- start: note that a task run begins of which no acquire tells, since it holds a permit of many.
-- ARGV  "#" and number of the permit, id of its lease, owner
-- returns 1
local LOCK, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local permit, id, owner = unpack(ARGV)
begin(permit, id, milliseconds(clock()), owner)
return 1
