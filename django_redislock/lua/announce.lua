-- announce: a task run is about to be put into the broker's queue; one at a time waits there.
-- ARGV  id of the task, ttl (ms)
-- returns '' if it may be published, else the id of the task that waits already, also for this call
local RUNS = unpack(KEYS)
-- include _lease
local id, ttl = unpack(ARGV)
local ms = milliseconds(clock())
local expiry, waiting = string.match(call('HGET', RUNS, 'queued') or '', '^(%d+)|(.*)$')
if expiry and tonumber(expiry) > ms and waiting ~= id then
  redis.pcall('HSET', RUNS, 'asked', digits(ms)) -- a server out of memory still says who waits
  return waiting
end
call('HDEL', RUNS, 'asked')
call('HSET', RUNS, 'queued', digits(ms + ttl) .. '|' .. id)
call('PEXPIRE', RUNS, digits(math.max(call('PTTL', RUNS), ttl)))
return ''
