-- inspect: what look does not tell: who waits, in the order they will be served, and who held it.
-- ARGV  how many waiters to name
-- returns {server time in ms, {{ticket, id, owner}, ...}, {entry of past, ...}}
-- include _lease
local ms = milliseconds(clock())
local waiters = {}
local queue = call('ZRANGE', QUEUE, 0, ARGV[1] - 1, 'WITHSCORES')
for i = 1, #queue, 2 do
  local record = call('HGET', WAITERS, queue[i]) or ''
  local expiry, id, owner = string.match(record, '^(%d+)|[^|]*|%d+|(%x+)|(.*)$')
  if expiry and tonumber(expiry) > ms then
    table.insert(waiters, { digits(queue[i + 1]), id, owner })
  end
end
return { digits(ms), waiters, call('LRANGE', PAST, 0, -1) }
