-- start: note that a task run begins, if no acquire does: the run holds one permit of many.
-- ARGV  "#" and number of the permit, id of its lease, owner, retention (see _runs.lua)
-- returns 1
local LOCK, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local permit, id, owner, retention = unpack(ARGV)
begin(id, milliseconds(clock()), owner, retention, permit)
return 1
