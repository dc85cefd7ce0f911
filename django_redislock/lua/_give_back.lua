-- give_back: take back the start of *token*, which is over then. Those behind it become due earlier, and their waiters
-- are rung.
-- include _ring
local function give_back(token, over, every)
  local was_made = not is_waited_for(token, digits(over))
  drop(token, digits(over))
  local now = tonumber(clock())
  if over <= now then
    return -- since then the rate had its whole burst again, or others were late because of themselves
  end
  local _, _, _, _, _, _, made = last_start()
  if was_made and made > now then
    keep_made(made - every)
  end

  -- All starts behind it followed without a gap, since it is not over yet. Now they are scheduled anew: one that is not
  -- due as if it were asked for now, and any other as if it were made now, but no later than it was.
  local behind = call('ZRANGE', RATE, digits(over), '+inf', 'BYSCORE', 'WITHSCORES')
  local waiters = {}
  for i = 1, #behind, 2 do
    if #behind[i] > 32 then
      waiters[string.sub(behind[i], 1, 32)] = behind[i]
    end
  end
  local before = over - every
  for i = 1, #behind, 2 do
    local start, its_over = behind[i], tonumber(behind[i + 1])
    if #start == 32 then
      local waiter = waiters[start]
      local its_every, burst, channel, id = string.match(waiter or '', WAITER)
      before = math.min(math.max(before, now) + (its_every or every), its_over)
      call('ZADD', RATE, digits(before), start, digits(before), waiter or start)
      if id and channel ~= '' and its_over - burst * its_every > now then
        local left = math.max(before - burst * its_every - now, 0)
        ring(channel, 'look ' .. id .. ' ' .. digits(math.ceil(left / 1000)))
      end
    end
  end
end
