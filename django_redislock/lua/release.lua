-- release: end a lease, only for the owner's token, and hand the lock to the next waiter.
--          If something is to stay behind, conclude does so instead; if an acquire was given up, leave.
-- ARGV  token
-- returns 'released', or why not: 'gone', 'taken', 'forced'
local LOCK, QUEUE, FENCE, FORCED, HELD = unpack(KEYS)
-- include _lease
local token = ARGV[1]
local value = call('GET', LOCK)
local first, is_over

if value and string.sub(value, 1, 33) == token .. 'h' then
  -- include _end
  if is_over then
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
