-- past: note a lease for the timeline of the lock.
--
-- past     the last leases that lasted a while, oldest first:
--          id "|" fence "|" since(ms) "|" until(ms) "|" ended "|" owner
--          ended: done, failed, replaced or forced. A lease that is noted while it is held has neither until nor
--          ended; its end replaces the entry. An entry that is not replaced is that of an expired lease.
--
-- This is only for listings: trouble with it (pcall) never fails an operation on the lock.

local MET = 40 -- expired leases are kept, at most: a client that notes one does not say how many to keep
local NOTED = 1500 -- ms: beyond NOTED_FROM in handle.py, so the owner tells the lease's end

-- retention: how many leases are kept, see _runs.lua; given when a lease ends
local function note_past(value, ended, ms, retention)
  local fence, since, owner_at = string.match(value, '^|(%d+)|(%d+)|%d+|%d+|[^|]*|()', 56)
  local id = string.sub(value, 40, 55) .. '|'
  local last = redis.pcall('LINDEX', PAST, -1)
  local noted = type(last) == 'string' and string.sub(last, 1, 17) == id
  local stop = ''
  if ended ~= '' then
    stop = ms
  elseif noted then
    return
  end
  local entry = id .. fence .. '|' .. since .. '|' .. stop .. '|' .. ended .. '|' .. string.sub(value, owner_at)
  local most, size = tonumber(string.match(retention or '', '^%d+/%d+/(%d+)$') or MET)
  if noted then
    redis.pcall('LSET', PAST, -1, entry)
  else
    size = redis.pcall('RPUSH', PAST, entry)
    local expired = ended == '' and type(last) == 'string' and string.find(last, '^%x+|%d+|%d+||')
    if expired and type(size) == 'number' then
      redis.pcall('LTRIM', PAST, -math.max(size - 1, MET), -1) -- those before the last one were counted at its end
    end
  end
  if ended ~= '' and not (type(size) == 'number' and size <= most) then
    redis.pcall('LTRIM', PAST, -most, -1)
  end
  redis.pcall('PEXPIRE', PAST, 2 * DAY)
end

-- Notes a lease that another client meets before its first renewal, or that was not confirmed in time. If it
-- expires, its owner is then known.
local function note_met(value, ms)
  local state, renewals, since, confirm_by =
    string.match(value, '^([hc])[r-](%d%d%d%d%d)%x+|%d+|(%d+)|%d+|(%d+)|', 33)
  if renewals == '00000' then
    if state == 'h' and ms - since >= NOTED or state == 'c' and tonumber(confirm_by) <= ms then
      note_past(value, '')
    end
  end
end
