-- note_wait: note at a lease what its holder waits for, so that others can find a circle of waits.
-- ARGV  id of the lease, id of the waiter, its wait as rules/stored.py writes it, or '' once that is over
-- returns 1 if it is noted, else 0
--
-- waits    id of the lease "|" id of the waiter "|" ticket "|" limit "|" alias "|" name of the lock that it waits for
local LOCK, WAITS = unpack(KEYS)
-- include _lease
local id, waiter, wait = unpack(ARGV)
local note = id .. '|' .. waiter .. '|'
if wait == '' then
  if string.sub(call('GET', WAITS) or '', 1, #note) == note then
    call('DEL', WAITS)
  end
elseif call('GETRANGE', LOCK, 39, 54) == id then
  call('SET', WAITS, note .. wait, 'PX', WAITER_TTL)
  return 1
end
return 0
