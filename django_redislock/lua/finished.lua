-- finished: whether a task run has succeeded already.
-- ARGV  id of the run
-- returns ms since then, or -1
local DONE, FINISHED = unpack(KEYS)
-- include _lease
-- include _done_markers
local done_before = already_done('0|' .. ARGV[1])
return done_before and done_before[2] or -1
