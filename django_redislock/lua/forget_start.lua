-- forget_start: forget that a run has begun: its body was not started.
-- ARGV  id of its lease
-- returns 1
local LOCK, RUNS = unpack(KEYS)
-- include _lease
-- include _runs
forget(ARGV[1])
return 1
