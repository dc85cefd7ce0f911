-- acquire_permit: an acquire of one of the permits of a lock, whichever can be had first; see acquire.lua.
--
-- Permit 1 is the lock as it is without a limit. Permit 2 has LOCK and PAST with "#2" behind them,
-- and so on; all other KEYS here are common to all, so there is one queue. This script chooses a
-- permit, and acquires that.
--
-- KEYS  as acquire has them, those of permit 1
-- ARGV  as acquire has them, and before the channel: limit, how many permits there are
-- returns as acquire does, but for a grant: fence " " permit; and {'own', ...} in place of {'busy', ...}, and at
--         once, if another delivery of this task run has a permit
local LOCK, QUEUE, FENCE, PAST, HELD, DONE, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _grant
local token, id, ttl, mode, ticket, markers, renews, owner, limit, channel = unpack(ARGV)
local permits = tonumber(limit)
local locks, past = { LOCK }, PAST
for number = 2, permits do
  locks[number] = LOCK .. '#' .. number
end
local values = call('MGET', unpack(locks))
local chosen, refusal, pause_left, popped

-- The permit that this token has, if this is a resend, a look or a confirmation. Else the permit of another delivery
-- of the same task run: this delivery does not wait. Markers with a retention are a run's; if a
-- task's, the owner has its id. A lease of state k has ended, and only keeps its permit.
local task = string.match(markers, '^.[^|]*|.') and string.match(owner, '"task_id":".-[^\\]"')
for number, value in ipairs(values) do
  if value and string.sub(value, 33, 33) ~= 'k' then
    if string.sub(value, 1, 32) == token then
      chosen, refusal = number, nil
      break
    elseif task and string.find(value, task, 1, true) then
      chosen, refusal = number, 'own'
    end
  end
end

-- The first free permit up to *most*. EXISTS is asked too: MGET finds nothing where a key has another type.
local function first_free(most, from)
  for number = from or 1, most do
    if not values[number] and call('EXISTS', locks[number]) == 0 then
      return number
    end
  end
end

-- Makes this permit the LOCK of the rest of this script.
local function ask_for(number)
  LOCK, PAST = locks[number], number == 1 and past or past .. '#' .. number
end

if not chosen then
  chosen = first_free(permits)
  if not chosen or call('EXISTS', QUEUE) == 1 or values[1] and string.sub(values[1], 1, 4) == 'hold' then
    -- include _queue
    -- include _choice
  end
end
if refusal then
  mode = 'last' -- it leaves the queue
end
refusal = refusal or 'busy'
ask_for(chosen)
local permit = ' ' .. chosen
-- include _acquire
