-- force_release: end exactly the lease that an operator was shown, held or cooling.
-- ARGV  id of the lease, or of a strange value, see _sight.lua; id of this request (16 characters);
--       retention, see _runs.lua
-- returns {'released', value}, {'gone', ''} or {'taken', value of the lock now}; of a value, its beginning
local LOCK, QUEUE, FENCE, FORCED, PAST, HELD = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _sight
-- include _past
local wanted, request, retention = unpack(ARGV)
local forced = call('GETRANGE', FORCED, 0, SIGHT + 15)
if string.sub(forced, 1, 16) == request then
  return { 'released', string.sub(forced, 17) } -- a resend: the first try was carried out
end
local value, id, strange = sight()
if id == '' then
  return { 'gone', '' }
end
if id ~= wanted then
  return { 'taken', value }
end
local left = call('PTTL', LOCK)
pass_on(value)
-- The holder's next renewal then says "forced", however late within its lease it comes.
call('SET', FORCED, request .. value, 'PX', digits(math.max(left, 0) + 60000))
if strange == '' then
  note_past(value, 'forced', milliseconds(clock()), retention)
end
return { 'released', value }
