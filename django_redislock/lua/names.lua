-- names: a page of an index of locks: those that are held, that jobs have run under, or with an announced call.
-- ARGV  held, ran or calls, where to begin, how many at most, 1 for the last first, else 0
-- returns {how many there are in all, {lock key, its score in the index, ...}}
-- A text that is too long for a key of ours is passed over.
local HELD, RAN, CALLS = unpack(KEYS)
-- include _lease
local which, offset, limit, last_first = unpack(ARGV)
local LONGEST = 2048 -- bytes
local index, first = RAN, '-inf'
if which ~= 'ran' then
  index, first = which == 'held' and HELD or CALLS, digits(milliseconds(clock()))
end
local total = call('ZCOUNT', index, first, '+inf')
local keys
if last_first == '1' then
  keys = call('ZRANGE', index, '+inf', first, 'BYSCORE', 'REV', 'LIMIT', offset, limit, 'WITHSCORES')
else
  keys = call('ZRANGE', index, first, '+inf', 'BYSCORE', 'LIMIT', offset, limit, 'WITHSCORES')
end
local ours = {}
for i = 1, #keys, 2 do
  if #keys[i] <= LONGEST then
    table.insert(ours, keys[i])
    table.insert(ours, keys[i + 1])
  end
end
return { total, ours }
