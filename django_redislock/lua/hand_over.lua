-- hand_over: end a lease, and grant the next one to the bearer of its id; see take_up.lua.
-- The grant is unconfirmed: if nobody takes it up, it ends by itself, and the next waiter has the lock.
-- ARGV  token, token and id of the next lease, ms within which it can be taken up, owner, retention (see
--       _runs.lua)
-- returns 'given', or why not: 'gone', 'taken', 'forced'
local LOCK, QUEUE, FENCE, FORCED, PAST, HELD = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _past
-- include _absence
local token, next_token, id, within, owner, retention = unpack(ARGV)
local value = call('GET', LOCK)
if value and is_of(value, next_token) then
  return 'given' -- a resend
end
if not value or not is_of(value, token) or state_of(value) == 'k' or not read(value) then
  return absence(value, token)
end
local us = clock()
local fence = new_fence(us, (read(value)))
grant(next_token, id, within, '-', owner, fence, us, BATON, within)
note_past(value, 'done', milliseconds(us), retention)
list_pause(tell_waiter(0, tonumber(within)))
return 'given'
