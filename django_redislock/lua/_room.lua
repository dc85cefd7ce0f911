-- room: a lock that is new in the index of runs drops the records of locks that are older or too many.
--
-- lasts, most  see retention in _runs.lua

local MADE_ROOM = 8 -- locks whose records a new one drops, at most: more than one, in case *most* was lowered
local now = tonumber(ms)
local OF_WHO_WAITS = { queued = true, asked = true, terms = true, task = true, way = true }

-- Drops the records of a lock, but not the call that waits in the broker's queue, nor the arguments of calls.
local function drop_records(lock)
  local base = string.match(lock, '^(.*}:)lock$')
  if not base then
    return -- not ours
  end
  local runs = base .. 'runs'
  local waits_until, stays, last = time_of(redis.pcall('HGET', runs, 'queued')), {}, 0
  local fields = redis.pcall('HGETALL', runs)
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    local its_end = OF_WHO_WAITS[field] and waits_until
      or (field == 'last' or string.match(field, '^last:')) and time_of(value) or 0
    if its_end > now then
      stays[field], last = value, math.max(last, its_end)
    end
  end
  redis.pcall('DEL', base .. 'past')
  redis.pcall('DEL', runs)
  for field, value in pairs(stays) do
    redis.pcall('HSET', runs, field, value)
  end
  if last > 0 then
    redis.pcall('PEXPIRE', runs, digits(last - now))
  end
end

local size = redis.pcall('ZCARD', RAN)
local oldest = redis.pcall('ZRANGE', RAN, 0, MADE_ROOM - 1, 'WITHSCORES')
local dropped = 0
for i = 1, #oldest, 2 do
  if size - dropped <= tonumber(most) and tonumber(oldest[i + 1]) > ms - lasts then
    break
  end
  drop_records(oldest[i])
  dropped = dropped + 1
end
-- The end of the range counts from the last: with *dropped* = 0, a range of 0 to -1 would be all.
redis.pcall('ZREMRANGEBYRANK', RAN, 0, dropped - 1 - size)
