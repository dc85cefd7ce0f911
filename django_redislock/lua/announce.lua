-- announce: a task run is about to be put into the broker's queue; one at a time waits there.
-- ARGV  id of the run, ttl (ms)
-- returns '' if it may be published, else the id of the run that waits already
local RUNS = unpack(KEYS)
-- include _lease
local id, ttl = unpack(ARGV)
local ms = milliseconds(clock())
local expiry, waiting = string.match(call('HGET', RUNS, 'queued') or '', '^(%d+)|(.*)$')
if expiry and tonumber(expiry) > ms and waiting ~= id then
  return waiting
end
call('HSET', RUNS, 'queued', digits(ms + ttl) .. '|' .. id)
call('PEXPIRE', RUNS, math.max(30 * DAY, ttl))
return ''
