-- sight: the part of the lock key that may be shown, however large or strange the key is.
--
-- A key that is not ours is described by its type and size, such as "list 3", and a string by its
-- beginning too. Its id is made of this description, which an operator sees before deleting the key.

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

-- Returns the value or its beginning, the id that stands for it ('' without a key), and the description of
-- a key that is not ours, else ''.
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
