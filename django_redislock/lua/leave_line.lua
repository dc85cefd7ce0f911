-- leave_line: take a task run out of the line: it begins now, or never will.
-- ARGV  id of the task
-- returns 1 if it stood in the line, else 0
local LINE, DUE = unpack(KEYS)
local id = ARGV[1]
redis.call('ZREM', DUE, id)
return redis.call('ZREM', LINE, id)
