-- inspect: the waiters of a lock, in the order in which they will be served, and its timeline.
-- ARGV  how many waiters to name, and how many earlier leases
-- returns {server time in ms, {{ticket, id, owner}, ...}, {entry of past, ...}}
-- A key of another type in the place of one of the two (pcall) must not hide the other.
local QUEUE, PAST, RATE = unpack(KEYS)
-- include _lease
local ms = milliseconds(clock())
local waiters = {}
local queue = redis.pcall('ZRANGE', QUEUE, 0, 2 * ARGV[1] - 1, 'WITHSCORES')
for i = 1, #queue, 2 do -- of tokens and records, see _queue.lua
  local expiry, id, owner = string.match(queue[i], '^[^|]+|(%d+)|[^|]*|%d+|[r-]%d*|(%x+)|(.*)$')
  if expiry and tonumber(expiry) > ms then
    table.insert(waiters, { digits(queue[i + 1]), string.sub(id, 1, 16), string.sub(owner, 1, SIGHT) })
  end
end
-- include _starts
local _, every, burst = last_start()
if every then
  local due = digits(tonumber(clock()) + burst * every + 1)
  for _, member in ipairs(redis.pcall('ZRANGE', RATE, due, '+inf', 'BYSCORE', 'LIMIT', 0, 2 * ARGV[1])) do
    local _, _, _, id, since, owner = string.match(member, WAITER)
    if id then
      table.insert(waiters, { since, string.sub(id, 1, 16), string.sub(owner, 1, SIGHT) })
    end
  end
end
local past = redis.pcall('LRANGE', PAST, -(ARGV[2] or 40), -1)
for i, entry in ipairs(past) do
  past[i] = string.sub(entry, 1, SIGHT)
end
return { digits(ms), waiters, past.err and {} or past }
