-- take_up: acquire only the lease that was handed over under this id; see hand_over.lua.
-- ARGV  as acquire has them; mode, ticket and channel are ignored
-- returns the fence, if it is granted, and behind it " " permit, if that is not the first;
--         {'done', ...} or {'finished', ...} as acquire does, and the lock goes on to the next
--         waiter; or {'lost', why}: 'gone', 'taken', 'forced'
local LOCK, QUEUE, FENCE, FORCED, PAST, HELD, DONE, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
local token, id, ttl, mode, ticket, markers, renews, owner, channel = unpack(ARGV)
local value = call('GET', LOCK) or ''
local us = clock()
local ms = milliseconds(us)
local fence, since, confirm_by, rung_at = read(value)
local is_baton = state_of(value) == 'c' and rung_at == BATON and string.sub(value, 40, 55) == id
local is_mine = fence and is_of(value, token) and state_of(value) ~= 'k' -- a resend

if not is_mine and (not is_baton or tonumber(confirm_by) <= ms) then
  call('PEXPIRE', FORCED, 1, 'GT') -- as in _absence.lua: a former master must not say so
  if string.sub(call('GET', FORCED) or '', 56, 71) == id then
    return { 'lost', 'forced' }
  end
  return { 'lost', (value == '' or is_baton) and 'gone' or 'taken' }
end

local started
if markers ~= '' then
  -- include _done_markers
  -- include _runs
  local done_before = already_done(markers)
  if done_before then
    pass_on(value)
    return done_before
  end
  started = string.match(markers, '^.([^|]*)|') ~= '' and begin
end
if is_mine then
  call('PEXPIRE', LOCK, ttl, 'GT') -- a late resend must not shorten a lease that is longer by now
  redis.pcall('ZADD', HELD, 'GT', ms + ttl, LOCK)
else
  since = ms
  grant(token, id, ttl, renews, owner, fence, us, '')
  list_pause(call('ZRANGE', QUEUE, 0, 1)[2])
end
if started then
  started(id, since, owner, string.match(markers, '^.([^|]*)|'))
end
return fence .. of_permit()
