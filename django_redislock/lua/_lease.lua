-- lease: how a lock is written down. Operations (not leave_line) begin with their keys, then this
-- file.
--
-- KEYS  each operation names those it may touch, see keys.py; FENCE and the indexes, HELD and RAN, are common to
--       all names, or on a cluster to those of one bucket
-- ARGV  each operation names its own. If the last is `channel`, it is added to the others: where the
--       asking connection is rung, or '', see scripts.py
--
-- lock     token(32) state(1) renews(1) renewals(5) id(16) "|" fence "|" since "|" ttl "|" confirm_by "|" channel "|" owner
--          state: h held; c handed over, to be confirmed; k kept by min_hold (cooling)
--          channel: where the waiter that must confirm it was rung; BATON, if the bearer of the id takes it up
--          renews: r if its owner is going to renew it, a third of the ttl from now; else -
--          since: server time of the grant; ttl: as granted, or made longer since; confirm_by: server time
--          until which a hand-over can be confirmed, and 0 for any other lease; all in ms
--          This is format 1. A newer format has its number, 2 to 9, in place of the state. It keeps the token, the id
--          and the first "|" where they are, and ends with "|" owner. A script that cannot read it leaves it as it is.
--
-- Scripts do not roll back, so every read that can fail comes before the first write. The index
-- is only a hint for listings: trouble with it (pcall) never fails an operation on the lock.
--
-- Operations answer the uncontended case first, and include _queue.lua after that: each run of a
-- script creates all functions on its way.

local call = redis.call
local CONFIRM_WITHIN = 1000 -- ms a handed-over lease waits for its owner's confirmation
local BATON = 'baton:' -- in place of a channel, and no process rings there; see hand_over.lua
local WAITER_TTL = 6000 -- ms a waiter's entry lives without a look; a waiter looks every 2000 ms
local DAY = 86400000 -- ms
local SIGHT = 8192 -- bytes of a strange value that are answered; values of ours are shorter, see rules/stored.py

-- Lua prints large numbers as 1.7e+15, and the server wants digits.
local function digits(number)
  return string.format('%.0f', number)
end

-- Server time in microseconds, as digits: joining two texts is cheaper than printing a number.
local function clock()
  local time = call('TIME')
  return time[1] .. string.sub('00000' .. time[2], -6)
end

local function milliseconds(us)
  return tonumber(string.sub(us, 1, -4))
end
