-- announce: a task run is about to be put into the broker's queue; one at a time waits there.
-- ARGV  id of the task, ttl (ms), ms until it may run, ms until its message expires; '' for never
--       arguments with which the waiting task is to run in place of its own; '' for its own; '-' if they are too
--       long to be kept, so that this task is published
--       name of the task; '' or nothing: a call of any task
--       the way of its message: its queue, routing key and priority; '' or nothing: any
-- returns '' if it is to be published, else the id of the task that waits already, and stands for this call too
local LOCK, RUNS, CALLS = unpack(KEYS)
-- include _lease
-- include _last_call
-- include _announced
local id, ttl, delay, lives, arguments, task, way = unpack(ARGV)
local SLACK = 1000 -- ms by which two times may differ and count as one
task, way = task or '', way or ''
local ms = milliseconds(clock())
local due, dies = ms + (delay or 0), tonumber(lives) and ms + lives
local expiry, waiting = string.match(call('HGET', RUNS, 'queued') or '', '^(%d+)|(.*)$')
if expiry and tonumber(expiry) > ms and waiting ~= id then
  local its_due, its_end = string.match(call('HGET', RUNS, 'terms') or '0|', '^(%d+)|(%d*)')
  local function is_other(field, own) -- older versions leave that of another call
    local of, its = string.match(call('HGET', RUNS, field) or '', '^(.-)|(.+)$')
    return own ~= '' and of == waiting and its ~= own
  end
  if is_other('task', task) then
    return '' -- two tasks with one key: a call of the other does not do the work of this one
  end
  its_end = tonumber(its_end)
  if arguments ~= '-' and its_due and not is_other('way', way) and tonumber(its_due) <= due + SLACK and not (its_end and (not dies or its_end + SLACK < dies)) then
    if arguments and arguments ~= '' then
      -- The waiting task may run later than announced, if it waits longer in the queue or in a worker.
      keep_last_call(waiting, ms, math.max(tonumber(expiry), tonumber(its_due)) - ms + DAY, arguments)
    end
    redis.pcall('HSET', RUNS, 'asked', digits(ms)) -- a server out of memory still names the waiting task
    return waiting
  end
end
if arguments and arguments ~= '' then
  local fields = call('HGETALL', RUNS)
  for i = 1, #fields, 2 do -- arguments of tasks whose worker has died, or whose message was dropped
    local ends = string.match(fields[i], '^last:') and string.match(fields[i + 1], '^%d+')
    if ends and tonumber(ends) <= ms then
      call('HDEL', RUNS, fields[i])
    end
  end
end
call('HDEL', RUNS, 'asked')
stand(id, ms, ttl, digits(due) .. '|' .. (dies and digits(dies) or ''))
for field, own in pairs({ task = task, way = way }) do
  if own ~= '' then
    call('HSET', RUNS, field, id .. '|' .. own)
  end
end
return ''
