-- retract: the run that was announced has started, or never will.
-- ARGV  id of the task
-- returns 1 if it was the one announced, else 0
local RUNS = unpack(KEYS)
-- include _lease
local waiting = string.match(call('HGET', RUNS, 'queued') or '', '^%d+|(.*)$')
if waiting ~= ARGV[1] then
  return 0
end
call('HDEL', RUNS, 'queued', 'asked', 'terms')
return 1
