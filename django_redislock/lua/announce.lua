-- announce: a task run is about to be put into the broker's queue; one at a time waits there.
-- ARGV  id of the task, ttl (ms), ms until it may run, ms until its message expires; '' for never
-- returns '' if it is to be published, else the id of the task that waits already, also for this call
local RUNS = unpack(KEYS)
-- include _lease
local id, ttl, delay, lives = unpack(ARGV)
local SLACK = 1000 -- what is no later and no earlier, in ms
local ms = milliseconds(clock())
local due, dies = ms + (delay or 0), tonumber(lives) and ms + lives
local expiry, waiting = string.match(call('HGET', RUNS, 'queued') or '', '^(%d+)|(.*)$')
if expiry and tonumber(expiry) > ms and waiting ~= id then
  local its_due, its_end = string.match(call('HGET', RUNS, 'terms') or '0|', '^(%d+)|(%d*)$')
  its_end = tonumber(its_end)
  if tonumber(its_due) <= due + SLACK and not (its_end and (not dies or its_end + SLACK < dies)) then
    redis.pcall('HSET', RUNS, 'asked', digits(ms)) -- a server out of memory still says who waits
    return waiting
  end
end
call('HDEL', RUNS, 'asked')
call('HSET', RUNS, 'queued', digits(ms + ttl) .. '|' .. id)
call('HSET', RUNS, 'terms', digits(due) .. '|' .. (dies and digits(dies) or ''))
call('PEXPIRE', RUNS, digits(math.max(call('PTTL', RUNS), ttl)))
return ''
