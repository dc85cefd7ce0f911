-- count_start: count the start of the body of a task run, until uncount_start says that it has ended.
-- ARGV  id of the lease, run (see _task_of.lua), ms in which a duplicate of the run is recognised
-- returns how many earlier starts of the same call, retries included, have not ended
--
-- starts  id of the lease and call of each start that has not ended -> when (ms)
local STARTS = unpack(KEYS)
-- include _lease
-- include _task_of
local id, run, recognised_for = unpack(ARGV)
local ms, task = milliseconds(clock()), task_of(run)
call('ZREMRANGEBYSCORE', STARTS, '-inf', ms - recognised_for)
local unended = 0
for _, start in ipairs(call('ZRANGE', STARTS, 0, -1)) do
  if string.sub(start, 17) == task and string.sub(start, 1, 16) ~= id then
    unended = unended + 1
  end
end
call('ZADD', STARTS, ms, id .. task)
call('ZREMRANGEBYRANK', STARTS, 0, -1001)
call('PEXPIRE', STARTS, recognised_for)
return unended
