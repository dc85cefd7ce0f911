-- finished: whether a task run has succeeded already.
-- ARGV  id of the run
-- returns ms since then, or -1
local DONE, FINISHED = unpack(KEYS)
-- include _lease
-- include _heed
local pointless = why_pointless('0' .. ARGV[1])
return pointless and pointless[2] or -1
