-- end: the usual end of a lease that is held: nobody waits for the lock, and it is deleted.
--
-- first    what was popped from the queue, as by _queue.lua: pop_waiter; nil if nothing may be popped here
-- is_over  whether the lease has ended

-- Any waiter may have the first permit, whose key has no number; not so the others.
if string.sub(LOCK, -4) == 'lock' then
  first = call('ZPOPMIN', QUEUE, 2)
elseif call('EXISTS', QUEUE) == 0 then
  first = {}
end
if first and not first[1] then
  call('DEL', LOCK)
  redis.pcall('ZREM', HELD, LOCK)
  is_over = true
end
