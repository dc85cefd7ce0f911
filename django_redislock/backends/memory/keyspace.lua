-- keyspace: what a server keeps, and the commands on it: those that ../../lua use, and no others.
--
-- A script is one call of Lua, and all that it calls is here. So no code of Python runs before it
-- ends: neither that of another thread, nor of a signal handler or a destructor, as on a server.
-- Arguments are strings, answers the bytes that a server sends (RESP2), read by interpreter.py.

local kinds = {} -- string, list, hash, zset, set or stream, by key
local values = {} -- by key: a string; an array; fields and their order; members and their scores
local ends = {} -- when keys expire, in ms; an expired key stays until a command meets it
local heard = {} -- the channels that somebody listens on
local rings = {} -- what the script that runs has published there: channel, message, ...
local us = 0 -- what the clock shows

local WRONGTYPE = 'WRONGTYPE Operation against a key holding the wrong kind of value'
local NOT_AN_INTEGER = 'ERR value is not an integer or out of range'
local NOT_A_FLOAT = 'ERR value is not a valid float'
local INFINITE = { ['inf'] = math.huge, ['+inf'] = math.huge, ['-inf'] = -math.huge }

local function fail(problem)
  error({ err = problem }, 0)
end

local function integer(text, problem)
  return string.match(text, '^[+-]?%d+$') and tonumber(text) or fail(problem or NOT_AN_INTEGER)
end

local function score_of(text, problem)
  return INFINITE[string.lower(text)]
    or (string.match(text, '^[%d.eE+-]+$') and tonumber(text))
    or fail(problem or NOT_A_FLOAT)
end

local function digits(score)
  return string.format('%.17g', score)
end

local function ms()
  return math.floor(us / 1000)
end

local function drop(key)
  kinds[key], values[key], ends[key] = nil, nil, nil
end

-- The kind of what a key holds; nil if it is not there.
local function find(key)
  local last = ends[key]
  if last and last < ms() then
    drop(key)
  end
  return kinds[key]
end

local function get(key, kind)
  local found = find(key)
  if found and found ~= kind then
    fail(WRONGTYPE)
  end
  return values[key]
end

-- As get(), for a range; its numbers are checked before the key is.
local function get_range(key, kind, start, stop)
  integer(start)
  integer(stop)
  return get(key, kind)
end

-- What a key holds, to be added to.
local function make(key, kind)
  local value = get(key, kind)
  if not value then
    value = (kind == 'hash' and { fields = {}, order = {} })
      or (kind == 'zset' and { scores = {}, count = 0 })
      or {}
    kinds[key], values[key] = kind, value
  end
  return value
end

-- The part of an array from *start* to *stop*, which belongs to it; negative ones count from the end.
local function bounds(start, stop, length)
  local first, last = integer(start), integer(stop)
  first = first < 0 and math.max(first + length, 0) or first
  last = last < 0 and last + length or math.min(last, length - 1)
  return first + 1, last + 1
end

local function part(array, first, last)
  local some = {}
  for i = first, last do
    table.insert(some, array[i])
  end
  return some
end

local function has(options, wanted)
  for i, option in ipairs(options) do
    if option == wanted then
      return i
    end
  end
end

-- Members of a sorted set with such scores, in order.
local function between(set, low, high)
  local scores, some = set and set.scores or {}, {}
  for member, score in pairs(scores) do
    if low <= score and score <= high then
      table.insert(some, member)
    end
  end
  table.sort(some, function(a, b)
    if scores[a] ~= scores[b] then
      return scores[a] < scores[b]
    end
    return a < b
  end)
  return some
end

local function by_score(key, least, most)
  local problem = 'ERR min or max is not a float'
  local low, high = score_of(least, problem), score_of(most, problem)
  return between(get(key, 'zset'), low, high)
end

-- All of them; kept until it is written to.
local function ordered(set)
  if not set then
    return {}
  end
  set.ordered = set.ordered or between(set, -math.huge, math.huge)
  return set.ordered
end

local function remove_members(key, set, members)
  local removed = 0
  for _, member in ipairs(members) do
    if set.scores[member] then
      set.scores[member], set.ordered = nil, nil
      set.count, removed = set.count - 1, removed + 1
    end
  end
  if set.count == 0 then
    drop(key)
  end
  return removed
end

local function told(set, members, options)
  if not has(options, 'WITHSCORES') then
    return members
  end
  local all = {}
  for _, member in ipairs(members) do
    table.insert(all, member)
    table.insert(all, digits(set.scores[member]))
  end
  return all
end

local function reversed(array)
  local all = {}
  for i = #array, 1, -1 do
    table.insert(all, array[i])
  end
  return all
end

local commands = {}

-- --- keys and their expiry ---

function commands.DEL(key)
  local there = find(key)
  drop(key)
  return there and 1 or 0
end

function commands.EXISTS(key)
  return find(key) and 1 or 0
end

function commands.TYPE(key)
  return { ok = find(key) or 'none' }
end

function commands.PEXPIRE(key, left, condition)
  local last = ms() + integer(left)
  -- No expiry is the latest.
  if
    not find(key)
    or (condition == 'GT' and last <= (ends[key] or math.huge))
    or (condition == 'NX' and ends[key])
  then
    return 0
  end
  ends[key] = last
  if last <= ms() then
    drop(key)
  end
  return 1
end

function commands.PTTL(key)
  if not find(key) then
    return -2
  end
  return ends[key] and ends[key] - ms() or -1
end

-- --- strings ---

function commands.GET(key)
  return get(key, 'string')
end

function commands.MGET(...)
  local all = {}
  for number, key in ipairs({ ... }) do
    all[number] = find(key) == 'string' and get(key, 'string') or false
  end
  return all
end

function commands.SET(key, value, option, left)
  local last
  if option == 'PX' then
    last = integer(left)
    if last <= 0 then
      fail("ERR invalid expire time in 'set' command")
    end
    last = ms() + last
  end
  kinds[key], values[key], ends[key] = 'string', value, last
  return { ok = 'OK' }
end

function commands.STRLEN(key)
  return #(get(key, 'string') or '')
end

function commands.GETRANGE(key, start, stop)
  local value = get_range(key, 'string', start, stop) or ''
  local first, last = bounds(start, stop, #value)
  return first <= last and string.sub(value, first, last) or ''
end

function commands.SETRANGE(key, offset, new)
  local at, value = integer(offset), get(key, 'string') or ''
  if #new > 0 then
    local before = string.sub(value, 1, at) .. string.rep('\0', at - #value)
    value = before .. new .. string.sub(value, at + #new + 1)
    kinds[key], values[key] = 'string', value
  end
  return #value
end

-- --- hashes ---

local function fields_of(key)
  return get(key, 'hash') or { fields = {}, order = {} }
end

local function set_field(key, field, value)
  local hash = make(key, 'hash')
  local new = hash.fields[field] == nil
  if new then
    table.insert(hash.order, field)
  end
  hash.fields[field] = value
  return new and 1 or 0
end

function commands.HGET(key, field)
  return fields_of(key).fields[field]
end

function commands.HMGET(key, ...)
  local fields, found = fields_of(key).fields, {}
  for number, field in ipairs({ ... }) do
    found[number] = fields[field] or false
  end
  return found
end

commands.HSET = set_field

function commands.HDEL(key, ...)
  local hash, removed = fields_of(key), 0
  for _, field in ipairs({ ... }) do
    if hash.fields[field] then
      hash.fields[field] = nil
      table.remove(hash.order, has(hash.order, field))
      removed = removed + 1
    end
  end
  if #hash.order == 0 then
    drop(key)
  end
  return removed
end

function commands.HGETALL(key)
  local hash, all = fields_of(key), {}
  for _, field in ipairs(hash.order) do
    table.insert(all, field)
    table.insert(all, hash.fields[field])
  end
  return all
end

function commands.HLEN(key)
  return #fields_of(key).order
end

function commands.HINCRBY(key, field, by)
  local more = integer(by)
  local number = integer(fields_of(key).fields[field] or '0', 'ERR hash value is not an integer') + more
  set_field(key, field, string.format('%.0f', number))
  return number
end

-- --- lists ---

function commands.LLEN(key)
  return #(get(key, 'list') or {})
end

function commands.LINDEX(key, index)
  local elements = get(key, 'list')
  if not elements then
    return nil
  end
  local at = integer(index)
  return elements[at < 0 and at + #elements + 1 or at + 1]
end

function commands.LRANGE(key, start, stop)
  local elements = get_range(key, 'list', start, stop) or {}
  return part(elements, bounds(start, stop, #elements))
end

function commands.RPUSH(key, ...)
  local elements = make(key, 'list')
  for _, element in ipairs({ ... }) do
    table.insert(elements, element)
  end
  return #elements
end

function commands.LSET(key, index, element)
  local elements = get(key, 'list') or fail('ERR no such key')
  local at = integer(index)
  at = at < 0 and at + #elements + 1 or at + 1
  if not elements[at] then
    fail('ERR index out of range')
  end
  elements[at] = element
  return { ok = 'OK' }
end

function commands.LTRIM(key, start, stop)
  local elements = get_range(key, 'list', start, stop) or {}
  local left = part(elements, bounds(start, stop, #elements))
  if #left == 0 then
    drop(key)
  else
    values[key] = left
  end
  return { ok = 'OK' }
end

-- --- sorted sets ---

local ZADD_OPTIONS = { NX = true, GT = true, CH = true }

function commands.ZADD(key, ...)
  local args, options, scores = { ... }, {}, {}
  while ZADD_OPTIONS[args[1]] do
    table.insert(options, table.remove(args, 1))
  end
  for i = 1, #args, 2 do
    scores[i] = score_of(args[i])
  end
  local set, added, changed = make(key, 'zset'), 0, 0
  for i = 1, #args, 2 do
    local score, member = scores[i], args[i + 1]
    local before = set.scores[member]
    local kept = before
      and (has(options, 'NX') or (has(options, 'GT') and score <= before) or score == before)
    if not kept then
      set.scores[member], set.ordered = score, nil
      changed = changed + 1
    end
    if not before then
      set.count, added = set.count + 1, added + 1
    end
  end
  return has(options, 'CH') and changed or added
end

function commands.ZREM(key, ...)
  local set = get(key, 'zset')
  return set and remove_members(key, set, { ... }) or 0
end

function commands.ZPOPMIN(key, count)
  local set, most = get(key, 'zset'), integer(count)
  local members = part(ordered(set), 1, math.min(most, set and set.count or 0))
  local popped = told(set, members, { 'WITHSCORES' })
  if set then
    remove_members(key, set, members)
  end
  return popped
end

function commands.ZSCORE(key, member)
  local set = get(key, 'zset')
  local score = set and set.scores[member]
  return score and digits(score)
end

function commands.ZCARD(key)
  local set = get(key, 'zset')
  return set and set.count or 0
end

function commands.ZCOUNT(key, least, most)
  return #by_score(key, least, most)
end

function commands.ZRANGE(key, start, stop, ...)
  local options = { ... }
  if not has(options, 'BYSCORE') then
    local set = get_range(key, 'zset', start, stop)
    local members = ordered(set)
    return told(set, part(members, bounds(start, stop, #members)), options)
  end
  local members
  if has(options, 'REV') then
    members = reversed(by_score(key, stop, start))
  else
    members = by_score(key, start, stop)
  end
  local limit = has(options, 'LIMIT')
  if limit then
    local offset, count = integer(options[limit + 1]), integer(options[limit + 2])
    members = part(members, offset + 1, math.min(offset + count, #members))
  end
  return told(get(key, 'zset'), members, options)
end

function commands.ZREVRANGE(key, start, stop, ...)
  local set = get_range(key, 'zset', start, stop)
  local members = reversed(ordered(set))
  return told(set, part(members, bounds(start, stop, #members)), { ... })
end

function commands.ZREMRANGEBYSCORE(key, least, most)
  local members = by_score(key, least, most)
  return #members > 0 and remove_members(key, values[key], members) or 0
end

function commands.ZREMRANGEBYRANK(key, start, stop)
  local set = get_range(key, 'zset', start, stop)
  local first, last = bounds(start, stop, set and set.count or 0)
  -- To put a long index in order costs time, and most often nothing is to go.
  return set and first <= last and remove_members(key, set, part(ordered(set), first, last)) or 0
end

-- --- what nobody here can make ---

function commands.SCARD(key)
  return #(get(key, 'set') or {})
end

function commands.XLEN(key)
  return #(get(key, 'stream') or {})
end

-- --- the server ---

function commands.TIME()
  local seconds = math.floor(us / 1000000)
  return { string.format('%.0f', seconds), string.format('%.0f', us - seconds * 1000000) }
end

function commands.PUBLISH(channel, message)
  if not heard[channel] then
    return 0
  end
  table.insert(rings, channel)
  table.insert(rings, message)
  return 1
end

commands.SPUBLISH = commands.PUBLISH

-- --- what scripts are given ---

local function call(name, ...)
  local command = commands[name] or fail('ERR unknown command ' .. name)
  local args = { ... }
  for i = 1, select('#', ...) do
    local kind = type(args[i])
    if kind == 'number' then
      args[i] = digits(args[i]) -- up to 17
    elseif kind ~= 'string' then
      fail('ERR Lua redis lib command arguments must be strings or integers')
    end
  end
  local reply = command(unpack(args))
  if reply == nil then
    return false
  end
  return reply
end

-- Lua 5.1 has no operations on bits.
local function bitwise(a, b, of)
  local result, place = 0, 1
  for _ = 1, 32 do
    local x, y = a % 2, b % 2
    if of(x, y) then
      result = result + place
    end
    a, b, place = (a - x) / 2, (b - y) / 2, place * 2
  end
  return result
end

local function differ(x, y)
  return x ~= y
end

local function both(x, y)
  return x == 1 and y == 1
end

local function rotated(word, by)
  local high = 2 ^ (32 - by)
  return (word % high) * 2 ^ by + math.floor(word / high)
end

local function sha1hex(text)
  local state = { 0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0 }
  local zeros = string.rep('\0', (55 - #text) % 64 + 4)
  local length = #text * 8
  text = text .. '\128' .. zeros
  for by = 24, 0, -8 do
    text = text .. string.char(math.floor(length / 2 ^ by) % 256)
  end
  for start = 1, #text, 64 do
    local words = {}
    for i = 0, 15 do
      local a, b, c, d = string.byte(text, start + 4 * i, start + 4 * i + 3)
      words[i] = ((a * 256 + b) * 256 + c) * 256 + d
    end
    for i = 16, 79 do
      local mixed = bitwise(bitwise(words[i - 3], words[i - 8], differ), words[i - 14], differ)
      words[i] = rotated(bitwise(mixed, words[i - 16], differ), 1)
    end
    local a, b, c, d, e = unpack(state)
    for i = 0, 79 do
      local f, k
      if i < 20 then
        f, k = bitwise(d, bitwise(b, bitwise(c, d, differ), both), differ), 0x5A827999
      elseif i < 40 then
        f, k = bitwise(bitwise(b, c, differ), d, differ), 0x6ED9EBA1
      elseif i < 60 then
        local one = bitwise(bitwise(b, c, differ), d, both)
        f, k = bitwise(bitwise(b, c, both), one, differ), 0x8F1BBCDC
      else
        f, k = bitwise(bitwise(b, c, differ), d, differ), 0xCA62C1D6
      end
      local sum = (rotated(a, 5) + f + e + k + words[i]) % 2 ^ 32
      a, b, c, d, e = sum, a, rotated(b, 30), c, d
    end
    for i, word in ipairs({ a, b, c, d, e }) do
      state[i] = (state[i] + word) % 2 ^ 32
    end
  end
  local hex = ''
  for _, word in ipairs(state) do
    hex = hex .. string.format('%04x%04x', math.floor(word / 65536), word % 65536)
  end
  return hex
end

redis = {
  call = call,
  pcall = function(...)
    local worked, reply = pcall(call, ...)
    if worked or (type(reply) == 'table' and reply.err) then
      return reply
    end
    error(reply, 0)
  end,
  sha1hex = sha1hex,
  -- There are no replicas.
  set_repl = function() end,
  REPL_NONE = 0,
  REPL_ALL = 3,
}

-- --- for interpreter.py ---

-- What a client reads when a script returns this.
local function sent(value)
  local kind = type(value)
  if kind == 'string' then
    return '$' .. #value .. '\r\n' .. value .. '\r\n'
  elseif kind == 'number' then
    -- As on a server, which cuts off what is behind the point.
    return ':' .. string.format('%.0f', value < 0 and math.ceil(value) or math.floor(value)) .. '\r\n'
  elseif kind == 'table' then
    if value.err then
      return '-' .. string.gsub(value.err, '[\r\n]', ' ') .. '\r\n'
    elseif value.ok then
      return '+' .. value.ok .. '\r\n'
    end
    local all = {}
    for _, one in ipairs(value) do -- An array ends with its first nil.
      table.insert(all, sent(one))
    end
    return '*' .. #all .. '\r\n' .. table.concat(all)
  end
  return value == true and ':1\r\n' or '$-1\r\n'
end

local server = { commands = {} }

for name in pairs(commands) do
  table.insert(server.commands, name)
end

-- Runs a script at a time; the clock never goes back. Answers what it returned, and what it rang.
function server.run(script, time, keys, ...)
  us, rings = math.max(us, time), {}
  KEYS = part({ ... }, 1, keys)
  ARGV = part({ ... }, keys + 1, select('#', ...))
  local worked, answer = pcall(script)
  if not worked and not (type(answer) == 'table' and answer.err) then
    answer = { err = 'ERR ' .. tostring(answer) }
  end
  return '*2\r\n' .. sent(answer) .. sent(rings)
end

function server.listen(channel)
  heard[channel] = true
end

function server.stop_listening(channel)
  heard[channel] = nil
end

-- Forgets all keys, and the time.
function server.clear()
  kinds, values, ends, us = {}, {}, {}, 0
end

-- All keys: {key, kind, when it expires in ms or '', what it holds as pairs or elements}, ...
function server.dump()
  local all = {}
  for key, kind in pairs(kinds) do
    local content, last = values[key], ends[key] -- before HGETALL drops a key that has expired
    if kind == 'hash' then
      content = commands.HGETALL(key)
    elseif kind == 'zset' then
      content = told(content, ordered(content), { 'WITHSCORES' })
    end
    table.insert(all, { key, kind, last and digits(last) or '', content })
  end
  return sent(all)
end

return server
