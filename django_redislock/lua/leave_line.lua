-- leave_line: a task run is deferred no more: it begins, or never will.
-- ARGV  id of the task
-- returns 1 if it stood in the line, else 0
local LINE, DUE = unpack(KEYS)
local id = ARGV[1]
redis.call('ZREM', DUE, id)
return redis.call('ZREM', LINE, id)
