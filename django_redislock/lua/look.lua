-- look: the state of a lock, without changing it; the same rule as acquire says whether it is free.
-- ARGV  -
-- returns {value or '', PTTL, live waiters, server time in ms}
local LOCK, QUEUE, WAITERS = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
local ms = milliseconds(clock())
-- What is not ours must not spoil a list of locks.
local value = redis.pcall('GET', LOCK) or ''
if type(value) == 'table' then
  value = 'not a string, but a ' .. call('TYPE', LOCK).ok
end
local left = call('PTTL', LOCK)
local _, _, claim = read(value)
if claim and state_of(value) == 'c' then
  left = math.min(left, claim - ms)
  if left <= 0 then
    value, left = '', -2
  end
end
local waiting = tonumber(redis.pcall('ZCARD', QUEUE)) or 0
if waiting > 0 and waiting <= 1000 then
  waiting = 0
  for _, record in ipairs(redis.pcall('HVALS', WAITERS)) do
    if tonumber(string.match(record, '^(%d+)|') or 0) > ms then
      waiting = waiting + 1
    end
  end
end
return { value, left, waiting, digits(ms) }
