-- starts: the starts under a rate, and their waiters.
--
-- rate     a sorted set. A start has its token as member; its score is when the start is over (us). While it is not
--          due, it has a second member with the same score, the record of its waiter: token(32) "|" every "|" burst
--          "|" channel "|" id "|" since(us) "|" owner. One member has the score 0, and tells of the rate and of the last start:
--          every "|" burst "|" when(ms) "|" id "|" made "|" owner
--          every: us between two starts; burst: how many may come at once; made: when the starts that were made are over
--          (us), each *every* after it was made, or after the one before if that is later
-- A start is due *burst* times *every* before it is over. It stays for KEPT_FOR after that, so a resend finds it;
-- longer if its waiter may be later.

local KEPT_FOR = 5000000 -- us; the same as LONGEST_OPERATION in rules/options.py
local LAST = '^(%d+)|(%d+)|(%d+)|(%x+)|(.*)$'
local MADE = '^(%d+)|(.*)$' -- older processes do not write it
local WAITER = '^[^|]+|(%d+)|(%d+)|([^|]*)|(%x+)|(%d+)|(.*)$'

-- Returns what is kept of the last start: all of it, every, burst, when, id, owner and made; '' if there is none.
local function last_start()
  local last = redis.pcall('ZRANGE', RATE, 0, 0)[1] or ''
  local every, burst, at, id, rest = string.match(last, LAST)
  local made, owner = string.match(rest or '', MADE)
  return last, every, burst, at, id, owner or rest, tonumber(made or 0)
end

-- Keeps *made* with the last start.
local function keep_made(made)
  local last, every, burst, at, id, owner = last_start()
  if every then
    call('ZADD', RATE, 0, table.concat({ every, burst, at, id, digits(made), owner }, '|'))
    call('ZREM', RATE, last) -- not before: a key without members is gone, and would come back without an expiry
  end
end

-- Takes out the start of *token*, and its waiter if it has one.
local function drop(token, over)
  for _, member in ipairs(call('ZRANGE', RATE, over, over, 'BYSCORE')) do
    if string.sub(member, 1, 32) == token then
      call('ZREM', RATE, member)
    end
  end
end

-- Whether the start of *token* is waited for; else it was made.
local function is_waited_for(token, over)
  for _, member in ipairs(call('ZRANGE', RATE, over, over, 'BYSCORE')) do
    if #member > 32 and string.sub(member, 1, 32) == token then
      return true
    end
  end
end
