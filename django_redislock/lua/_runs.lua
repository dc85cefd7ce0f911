-- runs: what became of the task runs under this lock.
--
-- finished  ids of the runs that have succeeded -> when (ms), for as long as they are remembered
-- runs      success, failure, skip: the last of each: when(ms) "|" how long(ms) "|" why "|" owner
--           skips: how many since the last success
-- ran       the lock keys by the time of their last run, for listings
--
-- Trouble with it (pcall) never fails an operation on the lock.

local function note(what, ms, lasted, why, owner)
  redis.pcall('HSET', RUNS, what, digits(ms) .. '|' .. digits(lasted) .. '|' .. why .. '|' .. owner)
  if what == 'success' then
    redis.pcall('HDEL', RUNS, 'skips')
  elseif what == 'skip' then
    redis.pcall('HINCRBY', RUNS, 'skips', 1)
  end
  redis.pcall('PEXPIRE', RUNS, 30 * DAY)
  if RAN then
    redis.pcall('ZADD', RAN, ms, LOCK)
    redis.pcall('ZREMRANGEBYRANK', RAN, 0, -10001)
  end
end

-- A duplicate of the run *id* that is delivered within *remembered* ms does not run again.
local function finish(id, ms, remembered)
  redis.pcall('ZADD', FINISHED, ms, id)
  redis.pcall('ZREMRANGEBYSCORE', FINISHED, '-inf', ms - remembered)
  redis.pcall('ZREMRANGEBYRANK', FINISHED, 0, -10001)
  redis.pcall('PEXPIRE', FINISHED, remembered)
end
