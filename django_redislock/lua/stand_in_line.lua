-- stand_in_line: give a task run that found the lock busy a position among the deferred runs, or the one it had.
-- ARGV  id of the task, ticket, began, left, state, spacing, permits
--       ticket: its position in the line, 0 for a new one at the end
--       began: when the lease that is in its way was granted (ms, server time)
--       left: ms until that lease must have ended; state: cooling, or any other
--       spacing: ms that the lock is kept at least for each run; permits: how many may run at a time
-- returns {ticket, how many are before it, ms until its turn, as far as can be said}
local RUNS, LINE, DUE = unpack(KEYS)
-- include _lease
local id, ticket, began, left, state, spacing, permits = unpack(ARGV)
local LATE = 3000 -- ms after its turn at which a run that has not come back is given up
local LONGEST = 60000 -- ms for which a run stays away at most, see celery/defer.py
local UNKNOWN = 500 -- ms that a run is assumed to last while none has ended yet
local us = clock()
local ms = milliseconds(us)

-- A run that has not come back was revoked, has expired, or is lost with its broker or worker.
for _, lost in ipairs(call('ZRANGE', DUE, '-inf', digits(ms), 'BYSCORE', 'LIMIT', 0, 100)) do
  call('ZREM', LINE, lost)
  call('ZREM', DUE, lost)
end

if ticket == '0' then
  ticket = call('ZSCORE', LINE, id) or us
  local last = call('ZREVRANGE', LINE, 0, 0, 'WITHSCORES')
  if ticket == us and last[1] and tonumber(last[2]) >= tonumber(us) then
    ticket = last[2] + 1 -- the clock was set back
  end
  ticket = digits(ticket)
end

-- How long runs last on average; the last ones count most.
local function length_of_runs()
  local at, lasted
  for _, ended in ipairs({ 'success', 'failure' }) do
    local when, long = string.match(call('HGET', RUNS, ended) or '', '^(%d+)|(%d+)|')
    if when and (not at or tonumber(when) > tonumber(at)) then
      at, lasted = when, long
    end
  end
  local counted, mean = string.match(call('HGET', RUNS, 'pace') or '', '^(%d+)|(%d+)$')
  if at and at ~= counted then
    mean = digits(mean and (3 * mean + lasted) / 4 or lasted)
    redis.pcall('HSET', RUNS, 'pace', at .. '|' .. mean)
  end
  return mean and tonumber(mean)
end

local lasts = math.max(ms - began, 0)
local usual = math.max(length_of_runs() or math.max(lasts, UNKNOWN), tonumber(spacing))
local each = usual / permits
local rest = tonumber(left)
if state ~= 'cooling' then
  -- If a run takes longer than usual, nobody knows when it ends: come back ever more seldom.
  rest = math.min(rest, math.max(usual - lasts, lasts / 10))
  if permits ~= '1' then
    rest = math.min(rest, each)
  end
end
-- The next runs come back at short intervals, even if runs are long: those before them may be lost.
local before = call('ZCOUNT', LINE, '-inf', digits(ticket - 1))
local turn = rest + before * math.min(each, math.max(1000, each / 10))

call('ZADD', LINE, ticket, id)
call('ZADD', DUE, digits(ms + math.min(turn, LONGEST) + LATE), id)
call('PEXPIRE', LINE, LONGEST + 2 * LATE)
call('PEXPIRE', DUE, LONGEST + 2 * LATE)
return { ticket, before, digits(turn) }
