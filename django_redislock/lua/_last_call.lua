-- last call: the arguments with which a waiting call is to run, in place of its own.
--
-- runs      last:ID: until(ms) "|" the arguments of the last call that ID stands for, see announce.lua
--           last: until(ms) "|": until when any of these is kept

local function last_call(id)
  local entry = call('HGET', RUNS, 'last:' .. id)
  return entry and string.match(entry, '^%d+|(.*)$')
end

local function keep_last_call(id, ms, lasts, arguments)
  local ends = math.max(ms + lasts, tonumber(string.match(call('HGET', RUNS, 'last') or '', '^%d+') or 0))
  local left = math.max(call('PTTL', RUNS), lasts)
  call('HSET', RUNS, 'last:' .. id, digits(ms + lasts) .. '|' .. arguments)
  call('HSET', RUNS, 'last', digits(ends) .. '|')
  call('PEXPIRE', RUNS, digits(left))
end
