-- renew: restart the ttl of a lease; never bring one back to life.
-- ARGV  token, ttl (ms), renews and renewals so far, see _lease.lua; 00000 only confirms a hand-over
-- returns 'renewed', or why not: 'gone', 'taken', 'forced'
local LOCK, FORCED, PAST, HELD = unpack(KEYS)
-- include _lease
local token, ttl, count = unpack(ARGV)
local renewals = string.sub(count, 2)
local value = call('GET', LOCK)
local state = value and string.sub(value, 1, 32) == token and string.sub(value, 33, 33)

if state and state ~= 'k' then
  -- PEXPIRE first: it is allowed on a server out of memory, and so is what follows it.
  call('PEXPIRE', LOCK, ttl)
  call('SETRANGE', LOCK, 32, 'h' .. count)
  if HELD and renewals ~= '00000' then
    redis.pcall('ZADD', HELD, milliseconds(clock()) + ttl, LOCK)
  end
  -- A lease that is renewed once is long enough to be remembered, also if its owner dies.
  if renewals == '00001' then
    -- include _past
    remember(value, '')
  end
  return 'renewed'
end

-- include _absence
return absence(value, token)
