-- resume: end the pause of a lock, or take it out of the queue; never end anybody else's lease.
-- ARGV  retention, see _runs.lua
-- returns the owner of the pause; '' if there is none
local LOCK, QUEUE, FENCE, PAST, HELD, RATE = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _past

-- All permits but the first may be free: when the first waiter looks, it hands them out.
local function tell_of_permits()
  if limit_of(call('ZRANGE', QUEUE, 0, 1)[2]) > 1 then
    tell_waiter(0, 0)
  end
end

local retention = unpack(ARGV)
local value = call('GET', LOCK) or ''
if is_pause(value) and read(value) then
  pass_on(value)
  tell_of_permits()
  local last = redis.pcall('ZREVRANGE', RATE, 0, 0, 'WITHSCORES')[2]
  if last then
    redis.pcall('ZADD', HELD, 'GT', digits(last / 1000), LOCK) -- its starts are listed again
  end
  note_past(value, 'done', milliseconds(clock()), retention)
  return string.match(value, '^|%d+|%d+|%d+|%d+|[^|]*|(.*)$', 56)
end
local first, record = unpack(call('ZRANGE', QUEUE, 0, 1))
if not first or not is_pause(first) then
  return ''
end
dequeue(first)
tell_of_permits()
local ms, left = milliseconds(clock()), call('PTTL', LOCK)
if left >= 0 then
  redis.pcall('ZADD', HELD, ms + left, LOCK) -- no longer to the end of the pause
elseif left == -2 then
  redis.pcall('ZREM', HELD, LOCK)
end
local expiry, _, _, _, _, owner = string.match(record or '', RECORD)
return expiry and tonumber(expiry) > ms and owner or ''
