-- renew: restart the ttl of a lease; never bring one back to life.
-- ARGV  token, ttl (ms), renews and renewals so far, see _lease.lua; 00000 only confirms a hand-over
-- returns 'renewed', or why not: 'gone', 'taken', 'forced'
local LOCK, FORCED, PAST, HELD = unpack(KEYS)
-- include _lease
local token, ttl, count = unpack(ARGV)
local renewals = string.sub(count, 2)
local value = call('GET', LOCK)
local state = value and string.sub(value, 1, 32) == token and string.sub(value, 33, 33)

if state == 'h' or state == 'c' then
  -- PEXPIRE first: a server out of memory allows it, and then all writes that follow.
  local newest = state == 'c' or renewals > string.sub(value, 35, 39)
  if newest then
    call('PEXPIRE', LOCK, ttl)
    call('SETRANGE', LOCK, 32, 'h' .. count)
  else
    -- It was sent twice, or a later renewal has overtaken it, and may have asked for more.
    call('PEXPIRE', LOCK, ttl, 'GT')
  end
  local granted, rest = string.match(value, '^|%d+|%d+|(%d+)(|.*)$', 56)
  if granted and tonumber(ttl) > tonumber(granted) then
    -- Its owner has made it longer; listings judge the time that is left by this.
    call('SETRANGE', LOCK, #value - #rest - #granted, ttl .. rest)
  end
  if renewals ~= '00000' then
    redis.pcall('ZADD', HELD, 'GT', milliseconds(clock()) + ttl, LOCK)
  end
  -- A lease that is renewed once is long enough to be noted, also if its owner dies.
  if renewals == '00001' then
    -- include _past
    note_past(value, '')
  end
  return 'renewed'
end

-- include _absence
return absence(value, token)
