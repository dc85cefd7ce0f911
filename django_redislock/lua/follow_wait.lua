-- follow_wait: whether a wait goes on, which lease the wanted lock has, and what the holder of that waits for.
-- ARGV  id of the waiter, its ticket, 1 to ring it too: if it was killed, nobody hears the ring
-- returns {1 if the wait goes on, else 0; value of lock or its beginning, or ''; value of waits, or ''}
local LOCK, QUEUE, WAITS = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
local id, ticket, rings = unpack(ARGV)
local goes_on = 0
for _, member in ipairs(call('ZRANGE', QUEUE, ticket, ticket, 'BYSCORE')) do
  local expiry, channel, _, _, its_id = string.match(member, RECORD)
  if its_id == id and tonumber(expiry) > milliseconds(clock()) then
    -- The waiter drops a ring that says no more than this.
    goes_on = (rings == '0' or ring(channel, 'alive ' .. id) > 0) and 1 or 0
  end
end
local note = call('GET', WAITS) or ''
return { goes_on, call('GETRANGE', LOCK, 0, SIGHT - 1), string.sub(note, 1, SIGHT) }
