-- leave: forget a token whose acquire has failed or was interrupted.
-- ARGV  token; fence, if only that grant is to end, or '': this may come late, or once more, after
--       the token was granted anew; and if the acquire was of any permit of several, how many there
--       are
-- returns 1 if it held the lock after all (which is handed on), else 0
local LOCK, QUEUE, FENCE, RUNS, HELD = unpack(KEYS)
-- include _lease
-- include _grant
-- include _queue
local token, fence, limit = unpack(ARGV)
local value = call('GET', LOCK)
for number = 2, tonumber(limit or 1) do
  if value and is_of(value, token) then
    break
  end
  LOCK = KEYS[1] .. '#' .. number
  value = call('GET', LOCK)
end
dequeue(token)
-- Changes nothing, but a server that accepts no writes refuses it: a former master must not say that
-- nothing is left.
call('ZREM', QUEUE, token)
if value and is_of(value, token) and state_of(value) ~= 'k' and (not fence or fence == '' or read(value) == fence) then
  -- include _runs
  pass_on(value)
  if string.sub(value, 35, 39) == '00000' then
    forget(string.sub(value, 40, 55)) -- without a renewal: its run has never begun
  end
  return 1
end
return 0
