-- retract: the run that was announced has started, or never will.
-- ARGV  id of the run
-- returns 1 if it was the one announced, else 0
local RUNS = unpack(KEYS)
-- include _lease
local waiting = string.match(call('HGET', RUNS, 'queued') or '', '^%d+|(.*)$')
return waiting == ARGV[1] and call('HDEL', RUNS, 'queued') or 0
