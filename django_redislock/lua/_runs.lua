-- runs: what became of the task runs under this lock.
--
-- finished  ids of the tasks that have succeeded, and of runs (see _task_of.lua) that have finished
--           while the task goes on -> when (ms), for as long as they are remembered
-- runs      success, failure, skip: the last of each: when(ms) "|" how long(ms) "|" why "|" owner
--           skips: how many since the last success
--           queued: until(ms) "|" id of the task that waits in the broker's queue, see announce.lua
--           asked: when(ms) a call was last made that was not published because of it
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

-- A duplicate of *id*, a task or a run, that is delivered within *remembered* ms does not run again.
local function finish(id, ms, remembered)
  redis.pcall('ZADD', FINISHED, ms, id)
  redis.pcall('ZREMRANGEBYSCORE', FINISHED, '-inf', ms - remembered)
  redis.pcall('ZREMRANGEBYRANK', FINISHED, 0, -10001)
  redis.pcall('PEXPIRE', FINISHED, remembered)
end
