-- sight: what may be seen of the lock key, however large or strange it is.
--
-- What is not ours is told by its type and size, such as "list 3"; of a string, the beginning too.
-- Its id is made of just this: it is what an operator is shown before he has it deleted.

local function size_of(kind)
  if kind == 'string' then
    return call('STRLEN', LOCK)
  elseif kind == 'list' then
    return call('LLEN', LOCK)
  elseif kind == 'set' then
    return call('SCARD', LOCK)
  elseif kind == 'zset' then
    return call('ZCARD', LOCK)
  elseif kind == 'hash' then
    return call('HLEN', LOCK)
  elseif kind == 'stream' then
    return call('XLEN', LOCK)
  end
  return -1
end

-- The value or its beginning, the id that stands for it, and what it is if it is not ours, else ''.
-- The id is '' if the key is not there.
local function sight()
  local kind = call('TYPE', LOCK).ok
  if kind == 'none' then
    return '', '', ''
  end
  local value = kind == 'string' and call('GETRANGE', LOCK, 0, SIGHT - 1) or ''
  if read(value) and #value < SIGHT then
    return value, string.sub(value, 40, 55), ''
  end
  local strange = kind .. ' ' .. digits(size_of(kind))
  return value, string.sub(redis.sha1hex(strange .. '|' .. value), 1, 16), strange
end
