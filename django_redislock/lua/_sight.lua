-- sight: the part of the lock key that may be shown, however large or strange the key is.
--
-- A key that is not ours is described by its type and size, such as "list 3", and a string by its
-- beginning too. Its id is made of this description, which an operator sees before deleting the key.
-- A lease of a newer format is described in the same way, and has an id of its own: see _lease.lua.

local SIZE = { string = 'STRLEN', list = 'LLEN', set = 'SCARD', zset = 'ZCARD', hash = 'HLEN', stream = 'XLEN' }

-- Returns the value or its beginning, the id that stands for it ('' without a key), and a description if
-- read() cannot read the value, else ''.
local function sight()
  local kind = call('TYPE', LOCK).ok
  if kind == 'none' then
    return '', '', ''
  end
  local value = kind == 'string' and call('GETRANGE', LOCK, 0, SIGHT - 1) or ''
  if read(value) and #value < SIGHT then
    return value, string.sub(value, 40, 55), ''
  end
  local size = SIZE[kind] and call(SIZE[kind], LOCK) or -1
  local strange = kind .. ' ' .. digits(size)
  if string.match(value, '^[2-9]......%x+()|', 33) == 56 then
    return value, string.sub(value, 40, 55), strange
  end
  return value, string.sub(redis.sha1hex(strange .. '|' .. value), 1, 16), strange
end
