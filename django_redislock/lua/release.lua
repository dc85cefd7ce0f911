-- release: end a lease, only for the owner's token, and hand the lock to the next waiter.
--          If something is to stay behind, conclude does so instead; if an acquire was given up, leave.
-- ARGV  token
-- returns 'released', or why not: 'gone', 'taken', 'forced'
local LOCK, QUEUE, FENCE, FORCED, HELD = unpack(KEYS)
-- include _lease
local token = ARGV[1]
local value = call('GET', LOCK)
local first

if value and string.sub(value, 1, 33) == token .. 'h' then
  -- The first waiter, see _queue.lua. Any waiter may have the first permit, whose key has no number; not so the others.
  if string.sub(LOCK, -4) == 'lock' then
    first = call('ZPOPMIN', QUEUE, 2)
  elseif call('EXISTS', QUEUE) == 0 then
    first = {}
  end
  if first and not first[1] then
    call('DEL', LOCK)
    redis.pcall('ZREM', HELD, LOCK)
    return 'released'
  end
end

-- include _grant
-- include _queue
-- include _absence
if not value or not is_of(value, token) then
  return absence(value, token)
end
if state_of(value) ~= 'k' then
  pass_on(value, first)
end
return 'released'
