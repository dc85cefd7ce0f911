-- force_release: an operator ends exactly the lease that was shown to him, held or cooling.
-- ARGV  id of the lease; for a value that is not ours, the first 16 digits of its SHA-1
-- returns {'released', value}, {'gone', ''} or {'taken', value of the lock now}
local LOCK, QUEUE, WAITERS, FENCE, FORCED, PAST, HELD = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _past
local value = call('GET', LOCK)
if not value then
  return { 'gone', '' }
end
local ours = read(value)
local id = ours and string.sub(value, 40, 55) or string.sub(redis.sha1hex(value), 1, 16)
if id ~= ARGV[1] then
  return { 'taken', value }
end
local left = call('PTTL', LOCK)
call('GET', FORCED)
pass_on(value, first_waiter())
if ours then
  -- So that the holder's next renewal says "forced", however late within its lease it comes.
  call('SET', FORCED, string.sub(value, 1, 32), 'PX', digits(math.max(left, 0) + 60000))
  remember(value, 'forced')
end
return { 'released', value }
