-- past: remember a lease for the timeline of who held the lock.
--
-- past     the last leases that lasted a while, oldest first:
--          id "|" fence "|" since(ms) "|" until(ms) "|" ended "|" owner
--          ended: done, failed or forced; a lease that is still held has neither until nor ended,
--          and the entry of its end comes later. One that never comes: it expired.
--
-- It is only for listings: trouble with it (pcall) never fails an operation on the lock.

local function remember(value, ended)
  local fence, since, owner = string.match(value, '^|(%d+)|(%d+)|%d+|%d+|[^|]*|(.*)$', 56)
  local stop = ''
  if ended ~= '' then
    stop = digits(milliseconds(clock()))
  end
  local entry = { string.sub(value, 40, 55), fence, since, stop, ended, owner }
  redis.pcall('RPUSH', PAST, table.concat(entry, '|'))
  redis.pcall('LTRIM', PAST, -40, -1)
  redis.pcall('PEXPIRE', PAST, 2 * DAY)
end
