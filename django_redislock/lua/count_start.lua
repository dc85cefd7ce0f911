-- count_start: count the start of the body of a task run, until uncount_start says that it has ended.
-- ARGV  id of the lease, run, ms in which a duplicate of the run is recognised
-- returns how many earlier starts of the same run have not ended. A retry is another run: its message proves that the
--         body before it has not killed its process
--
-- starts  id of the lease and run of each start that has not ended -> when (ms)
local STARTS = unpack(KEYS)
-- include _lease
local id, run, recognised_for = unpack(ARGV)
local ms = milliseconds(clock())
call('ZREMRANGEBYSCORE', STARTS, '-inf', ms - recognised_for)
local unended = 0
for _, start in ipairs(call('ZRANGE', STARTS, 0, -1)) do
  if string.sub(start, 17) == run and string.sub(start, 1, 16) ~= id then
    unended = unended + 1
  end
end
call('ZADD', STARTS, ms, id .. run)
call('ZREMRANGEBYRANK', STARTS, 0, -1001)
call('PEXPIRE', STARTS, recognised_for)
return unended
