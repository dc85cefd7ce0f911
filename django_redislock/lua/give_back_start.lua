-- give_back_start: undo a start, as if it had not been asked for. Those behind it become due earlier.
-- ARGV  token, every (us)
-- returns 1 if there was such a start, else 0
local LOCK, RATE = unpack(KEYS)
-- include _lease
-- include _starts
-- include _give_back
local token, every = unpack(ARGV)
local over = tonumber(call('ZSCORE', RATE, token))
-- Changes nothing, but a server that accepts no writes refuses it: a former master must not say that
-- nothing is left.
call('ZREM', RATE, token)
if not over then
  return 0
end
give_back(token, over, every)
return 1
