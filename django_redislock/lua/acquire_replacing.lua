-- acquire_replacing: an acquire by which the newest call wins; see acquire.lua.
--
-- It replaces only what can be replaced: holders and waiters whose owner says when they were called. Other waiters keep
-- their place. A waiter that is replaced leaves the queue at once. A holder is rung, and has *within* ms to end; the
-- lease stays until then, so that nobody begins before. A holder of which nobody hears, or that renews all the same,
-- loses the lease when this waiter looks at the end of that time. What is replaced counts as finished, so no redelivery
-- or retry of it runs.
--
-- KEYS  as acquire has them with done markers, and two more
-- ARGV  as acquire has them, and before the channel: within; called: when its call was made (ms), if this is not its
--       first delivery. Then it replaces no newer call, but ends. '' otherwise: what it finds came before it.
-- returns as acquire does, and behind {'queued', ...} how long (ms) the replaced holder has to end; {'own', ...} in
--         place of {'busy', ...}, and at once, if another delivery of its task run has the lock; {'replaced', owner of
--         the newer call}
local LOCK, QUEUE, FENCE, PAST, HELD, DONE, FINISHED, RUNS, RAN, FORCED, REPLACED = unpack(KEYS)
-- include _lease
-- include _grant
local token, id, ttl, mode, ticket, markers, renews, owner, within, called, channel = unpack(ARGV)
local limit, permit, refusal, pause_left, popped = '', '', 'busy'
local found = redis.pcall('GET', LOCK)
-- A waiter that did not hear that it is replaced must not run after the newer call, so it looks there too.
if type(found) == 'string' or call('EXISTS', QUEUE) == 1 or (not found and call('HGET', REPLACED, id)) then
  -- include _queue
  -- include _past
  -- include _done_markers
  -- include _replaced
  -- include _runs
  local ms = milliseconds(clock())
  local is_task = string.match(markers, '^.[^|]*|.')
  local task = is_task and string.match(owner, '"task_id":".-[^\\]"')
  local is_mine = found and is_of(found, token)

  local function called_at(its_owner)
    return tonumber(string.match(its_owner or '', '"called":"(%d+)"'))
  end

  -- Whether another delivery of this task run has this owner.
  local function is_own(its_owner)
    return task and string.find(its_owner, task, 1, true)
  end

  local function replace(its_id, its_channel, ends, its_owner)
    local lasts = math.max(ends - ms, 0)
    keep_replaced(its_id, lasts + 60000, ms, digits(ends) .. '|' .. digits(lasts) .. '|' .. owner)
    local its_task = string.match(its_owner, '"task_id":"(.-[^\\])"')
    if its_task then
      call('ZADD', FINISHED, ms, its_task .. '/') -- see _task_of.lua
      call('PEXPIRE', FINISHED, digits(math.max(call('PTTL', FINISHED), DAY)))
    end
    if its_channel and its_channel ~= '' then
      ring(its_channel, 'replaced ' .. its_id)
    end
  end

  local its_id, its_owner, its_end, told
  if found and not is_mine and read(found) and state_of(found) ~= 'k' then
    its_owner = string.match(found, '^|%d+|%d+|%d+|%d+|[^|]*|(.*)$', 56)
    its_id = called_at(its_owner) and string.sub(found, 40, 55)
    if its_id then
      its_end, told = replaced_by(its_id)
    end
  end
  local queue = call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
  local is_over, _, newer = replaced_by(id)
  newer = not is_mine and newer or nil
  -- A waiter that stood still has left the queue, so a newer call did not meet it there.
  if its_id and not (newer or its_end or is_own(its_owner)) and ticket ~= '0' and not call('ZSCORE', QUEUE, token) then
    local its_fence = read(found)
    newer = tonumber(its_fence) > tonumber(ticket) and its_owner or nil
  end
  if not newer and called ~= '' then -- it comes back, so it is older than what was called later
    if its_id and called_at(its_owner) > tonumber(called) then
      newer = its_owner
    end
    for i = 1, #queue, 2 do
      local waiter = string.match(queue[i], RECORD) and select(6, string.match(queue[i], RECORD))
      if (called_at(waiter) or 0) > tonumber(called) and not is_of(queue[i], token) then
        newer = waiter
      end
    end
  end
  local is_done = markers ~= '' and already_done(markers)
  if newer and not is_mine and not (is_done and is_over ~= 0) then
    call('PEXPIRE', REPLACED, 1, 'GT') -- as in _absence.lua: a former master must not say so
    dequeue(token)
    return { 'replaced', newer }
  end
  if its_owner and is_own(its_owner) then
    refusal, mode = 'own', 'last' -- it leaves the queue
  end

  if mode == 'queue' and not (is_done or is_mine) then
    local place = ticket == '0' and math.huge or tonumber(ticket)
    for i = 1, #queue, 2 do
      local _, rung_at, _, _, waiter, who = string.match(queue[i], RECORD)
      local is_older = waiter and tonumber(queue[i + 1]) < place and not is_of(queue[i], token)
      if is_older and called_at(who) and not is_own(who) then
        call('ZREM', QUEUE, string.sub(queue[i], 1, 32), queue[i])
        replace(waiter, rung_at, 0, who)
      end
    end
    -- A holder relies on the time that it was told: a call that leaves it less waits for longer.
    told = told or tonumber(within)
    if its_id and (not its_end or its_end - ms > told) then -- or the clock was set back
      its_end = ms + told
      local bell = string.match(call('HGET', REPLACED, 'bell:' .. its_id) or '', '^%d+|(.*)$')
      replace(its_id, bell, its_end, its_owner)
    end
    if its_end and its_end <= ms then
      -- Its next renewal is then told so.
      local left = math.max(call('PTTL', LOCK), 0) + 60000
      call('DEL', LOCK)
      redis.pcall('ZREM', HELD, LOCK)
      call('SET', FORCED, 'replaced        ' .. found, 'PX', digits(left))
      forget(its_id)
      note_past(found, 'replaced', ms, string.match(markers, '^.([^|]*)|'))
    elseif its_end then
      pause_left = its_end - ms
    end
  end
end
-- include _acquire
