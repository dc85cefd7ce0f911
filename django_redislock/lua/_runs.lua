-- runs: note what becomes of the runs under this lock.
--
-- finished  ids of the tasks that have succeeded, and of runs (see _task_of.lua) that have finished
--           while the task goes on -> when (ms), for as long as a duplicate of them is recognised
-- runs      success, failure, skip, abandoned: the last of each: when(ms) "|" how long(ms) "|" why "|" owner
--           skips: how many since the last success
--           skipped: when(ms) "," of each of the last skips
--           skips:JOB: both of one job, how many "|" when(ms) ","...; JOB as in its owner's JSON
--           queued: until(ms) "|" id of the task that waits in the broker's queue, see announce.lua
--           terms: when(ms) the queued task may run "|" when(ms) its message expires, or nothing
--           task: id of the queued task "|" its name, with more if not all its calls are the same
--           way: id of the queued task "|" the queue, routing key and priority of its message
--           asked: when(ms) the last call was made that was not published because of the queued one
--           last, last:ID: see _last_call.lua
--           started: the run that has begun, in the same form; why is the id of its lease, by which
--           one sees whether it goes on. There is one for each permit: started, started#2 and so on
--           pace: when(ms) the last run ended that is counted in "|" how long(ms) runs last, on average
--           unended: the last run that had not ended when another one began
-- ran       the lock keys by the time of their last run, for listings
-- retention lasts(ms) "/" most "/" timeline: runs is kept for *lasts* after the last run, past for
--           two days, both of *most* locks of this index; past has *timeline* leases. A lock that
--           is new in the index drops the records of locks that are older or too many. `finished`
--           stays: it is a promise, not a record.
--
-- Trouble with it (pcall) never fails an operation on the lock.

local SKIPPED = 30 * 14 -- characters: so many skips, each with 13 digits and a comma

-- The time in ms with which an entry begins; 0 if there is none.
local function time_of(entry)
  return type(entry) == 'string' and tonumber(string.match(entry, '^(%d+)|')) or 0
end

-- A field of an owner or of a note that ends with one, as JSON writes it; '' if it has none.
local function part_of(entry, field)
  local masked = string.find(entry, '\\', 1, true) and string.gsub(entry, '\\.', '__') or entry
  local _, before = string.find(masked, '"' .. field .. '":"', 1, true)
  local after = before and string.find(masked, '"', before + 1, true)
  return after and string.sub(entry, before + 1, after - 1) or ''
end

-- The field of the run that has begun under this permit.
local function field_of_run()
  return 'started' .. (string.match(LOCK, '}:lock(#%d+)$') or '')
end

-- Forgets the starts, *before* that of the run that has ended now, of the same call: a broker has brought it back.
-- A skip forgets only a start that another run has followed: an earlier delivery of its call may be at work.
local function forget_unended(owner, before, is_skip)
  local call_id, fields = part_of(owner, 'task_id'), {}
  if call_id ~= '' and is_skip then
    fields = { 'unended', redis.pcall('HGET', RUNS, 'unended') }
  elseif call_id ~= '' then
    fields = redis.pcall('HGETALL', RUNS)
  end
  for i = 1, #fields, 2 do
    local field, entry = fields[i], fields[i + 1]
    if field == 'unended' or string.find(field, '^started') then
      if type(entry) == 'string' and part_of(entry, 'task_id') == call_id and time_of(entry) < before then
        redis.pcall('HDEL', RUNS, field)
      end
    end
  end
end

-- Lets the records be kept for as long as they are to be, with all that waits in them: the fields *queued* and *last*.
local function keep(ms, retention, queued, last)
  local lasts, most = string.match(retention, '^(%d+)/(%d+)')
  local left = math.max(time_of(queued), time_of(last)) - ms
  redis.pcall('PEXPIRE', RUNS, left > tonumber(lasts) and digits(left) or lasts)
  if redis.pcall('ZADD', RAN, ms, string.match(LOCK, '^(.*}:lock)') or LOCK) == 1 then
    -- include _room
  end
end

-- *over* is the field of the run that has ended; nil if it has none.
local function note(what, ms, lasted, why, owner, retention, over)
  redis.pcall('HSET', RUNS, what, ms .. '|' .. lasted .. '|' .. why .. '|' .. owner)
  if what == 'success' then
    redis.pcall('HDEL', RUNS, 'skips', 'skips:' .. part_of(owner, 'task'), over or 'skips')
  elseif over then
    redis.pcall('HDEL', RUNS, over)
  elseif what == 'skip' and why ~= 'duplicate' then -- the work of a duplicate is done
    local of_job, now = 'skips:' .. part_of(owner, 'task'), ms .. ','
    redis.pcall('HINCRBY', RUNS, 'skips', 1)
    local skipped, by_job = unpack(redis.pcall('HMGET', RUNS, 'skipped', of_job))
    redis.pcall('HSET', RUNS, 'skipped', string.sub((skipped or '') .. now, -SKIPPED))
    local count, times = string.match(by_job or '', '^(%d+)|(.*)$')
    redis.pcall('HSET', RUNS, of_job, digits((count or 0) + 1) .. '|' .. string.sub((times or '') .. now, -SKIPPED))
  end
  if what ~= 'abandoned' then
    forget_unended(owner, ms - lasted, what == 'skip')
  end
  keep(ms, retention, unpack(redis.pcall('HMGET', RUNS, 'queued', 'last')))
end

-- Whether the run of *entry* has the lease *id*.
local function is_under(entry, id)
  return type(entry) == 'string' and string.match(entry, '^%d+|0|(%x+)|') == id
end

local function begin(id, ms, owner, retention)
  local field = field_of_run()
  local before, queued, last = unpack(redis.pcall('HMGET', RUNS, field, 'queued', 'last'))
  if not is_under(before, id) then
    if before then
      redis.pcall('HSET', RUNS, 'unended', before)
    end
    redis.pcall('HSET', RUNS, field, ms .. '|0|' .. id .. '|' .. owner)
    keep(ms, retention, queued, last)
  end
end

-- Forgets the run of the lease *id*, which has ended, or has never begun.
local function forget(id)
  if is_under(redis.pcall('HGET', RUNS, field_of_run()), id) then
    redis.pcall('HDEL', RUNS, field_of_run())
  end
end

-- Notes that *id*, a task or a run, has finished: a duplicate within *recognised_for* ms does not run.
local function finish(id, ms, recognised_for)
  redis.pcall('ZADD', FINISHED, ms, id)
  redis.pcall('ZREMRANGEBYSCORE', FINISHED, '-inf', ms - recognised_for)
  redis.pcall('ZREMRANGEBYRANK', FINISHED, 0, -10001)
  redis.pcall('PEXPIRE', FINISHED, recognised_for)
end
