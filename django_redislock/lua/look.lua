-- look: the state of a lock, by acquire's rules; the lock stays as it is, unless a pause is due.
-- A lease that is seen for the first time may be noted for the timeline, see _past.lua.
-- ARGV  -
-- returns {value or its beginning, ms until it ends (-1 never, -2 free), live waiters (beyond 1000,
--         all), server time in ms, id, description of a key that is not ours, see _sight.lua; value
--         of waits, or '', see note_wait.lua; and of a free lock with a rate: the starts left "|" ms
--         until the next is due "|" its last start, see _starts.lua}
local LOCK, QUEUE, FENCE, PAST, HELD, WAITS, RATE = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
-- include _sight
-- include _past
local ms = milliseconds(clock())
local value, id, strange = sight()
local left = call('PTTL', LOCK)
if left == -2 and is_pause(redis.pcall('ZRANGE', QUEUE, 0, 0)[1] or '') then
  pass_on(value) -- the lease in its way has ended by itself
  value, id, strange = sight()
  left = call('PTTL', LOCK)
end
local _, _, confirm_by = read(value)
note_met(value, ms)
if confirm_by and state_of(value) == 'c' and left >= 0 then
  -- An unconfirmed lease is shown as the lease that it becomes.
  left = confirm_by - ms > 0 and math.max(left - CONFIRM_WITHIN, 1) or -2
end
if left == -2 then
  value, id, strange = '', '', ''
  -- A key without expiry stays in the index until it is seen to be gone, see _acquire.lua.
  if redis.pcall('ZSCORE', HELD, LOCK) == 'inf' then
    redis.pcall('ZREM', HELD, LOCK)
  end
end
local waiting = (tonumber(redis.pcall('ZCARD', QUEUE)) or 0) / 2
if waiting > 0 and waiting <= 1000 then
  waiting = 0
  for _, member in ipairs(redis.pcall('ZRANGE', QUEUE, 0, -1)) do
    if tonumber(string.match(member, RECORD) or 0) > ms then
      waiting = waiting + 1
    end
  end
end
local wait = state_of(value) == 'h' and redis.pcall('GET', WAITS) or ''
if type(wait) ~= 'string' or string.sub(wait, 1, 16) ~= id then
  wait = '' -- not ours, or of an earlier lease
end
local rate
if left == -2 and call('EXISTS', RATE) == 1 then
  -- include _starts
  local _, every, burst, at, its_id, owner = last_start()
  if every then
    local now = tonumber(clock())
    local busy_for = math.max(redis.pcall('ZREVRANGE', RATE, 0, 0, 'WITHSCORES')[2] - now, 0)
    local starts = math.max(burst - math.ceil(busy_for / every), 0)
    local due = math.max(busy_for - (burst - 1) * every, 0)
    due = digits(math.ceil(due / 1000))
    rate = table.concat({ digits(starts), due, every, burst, at, its_id, string.sub(owner, 1, SIGHT) }, '|')
    waiting = redis.pcall('ZCOUNT', RATE, digits(now + burst * every + 1), '+inf') / 2
  end
end
return { value, left, waiting, digits(ms), id, strange, string.sub(wait, 1, SIGHT), rate }
