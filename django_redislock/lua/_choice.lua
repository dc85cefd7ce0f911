-- choice: which permit an acquire asks for, if there are waiters, or no permit is free.
--
-- No acquire passes the first waiter: only permits that this waiter may have count. All that are free go to the
-- waiters before this acquire. A pause on permit 1 keeps all permits from everybody. So does a pause that is first in
-- the queue, for pause_left ms.

local ms = milliseconds(clock())

-- Returns the first waiter, and the last permit that both it and this acquire may have.
local function first_in_line()
  local first, record = unpack(call('ZRANGE', QUEUE, 0, 1))
  while first and first ~= token and tonumber(string.match(record or '', RECORD) or 0) <= ms do
    -- It has died, or is not ours. Each turn removes something, or this loop would never end.
    call('ZREM', QUEUE, first, record and is_of(record, first) and record or first)
    first, record = unpack(call('ZRANGE', QUEUE, 0, 1))
  end
  pause_left = nil
  if not first or first == token then
    return first, permits
  end
  if is_pause(first) then
    local ends = string.match(record, RECORD)
    pause_left = ends - ms
  end
  return first, math.min(permits, is_pause(first) and 1 or limit_of(record))
end

local first, most
repeat
  first, most = first_in_line()
  local is_held_back = values[1] and is_pause(values[1])
  chosen = is_held_back and 1 or first_free(most)
  local is_of_another = chosen and not is_held_back and first and first ~= token
  if is_of_another then
    ask_for(chosen)
    local next_one, its_ticket = hand_over(pop_waiter(), nil, token)
    if next_one == token then -- all before it are dead
      first, most, popped, is_of_another = token, permits, { token, its_ticket }, false
    else
      values[chosen] = call('GET', LOCK)
    end
  end
until not is_of_another

if not chosen then -- the one that ends first; an unconfirmed one ends soon
  local soonest
  for number = 1, most do
    local left, value = call('PTTL', locks[number]), values[number] or ''
    local _, _, confirm_by = read(value)
    if left == -1 then
      left = math.huge
      redis.pcall('ZADD', HELD, '+inf', locks[number]) -- else no operator would see that a permit is missing
    elseif confirm_by and state_of(value) == 'c' then
      left = math.min(left, confirm_by - ms)
    end
    if not soonest or left < soonest then
      chosen, soonest = number, left
    end
  end
elseif first == token and first_free(most, chosen + 1) then
  tell_waiter(popped and 0 or 1, 0) -- the next one has a permit too
end
