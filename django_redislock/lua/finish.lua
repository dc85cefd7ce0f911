-- finish: note that a task run has finished, while its task goes on: it has published its own retry.
-- ARGV  id of the run, recognised_for (ms), see _runs.lua
-- returns 1
local FINISHED = unpack(KEYS)
-- include _lease
-- include _runs
local run, recognised_for = unpack(ARGV)
finish(run, milliseconds(clock()), recognised_for)
return 1
