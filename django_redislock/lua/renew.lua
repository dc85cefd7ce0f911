-- renew: restart the ttl of a lease; never bring one back to life.
-- ARGV  token, ttl (ms), renewals so far (6 digits)
-- returns 'renewed', or why not: 'gone', 'taken', 'forced'
local token, ttl, renewals = unpack(ARGV)
local value = call('GET', LOCK)
if not value or not is_of(value, token) or state_of(value) == 'k' then
  return absence(value, token)
end
-- PEXPIRE first: it is allowed on a server out of memory, and so is what follows it.
call('PEXPIRE', LOCK, ttl)
call('SETRANGE', LOCK, 32, 'h' .. renewals)
if INDEX then
  local _, ms = clock()
  redis.pcall('ZADD', INDEX, digits(ms + ttl), LOCK)
end
return 'renewed'
