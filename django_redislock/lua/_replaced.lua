-- replaced: which calls a newer one has replaced, and where the runs of such calls are rung.
--
-- replaced  id of a lease or of a waiter -> until(ms) "|" ends(ms) "|" within(ms) "|" owner of the newer call
--           ends: until when the lease has time to end; 0 for a waiter, which is out of the queue
--           within: how long its holder has to end since it was told so
--           "bell:" id of a lease -> until(ms) "|" channel of its holder
--           until: when the field may be dropped

local MOST_REPLACED = 200 -- fields; with more, those that may be dropped are

local function keep_replaced(field, lasts, ms, value)
  if call('HLEN', REPLACED) > MOST_REPLACED then
    local fields = call('HGETALL', REPLACED)
    for i = 1, #fields, 2 do
      if tonumber(string.match(fields[i + 1], '^%d+') or 0) < ms then
        call('HDEL', REPLACED, fields[i])
      end
    end
  end
  local left = math.max(call('PTTL', REPLACED), lasts)
  call('HSET', REPLACED, field, digits(ms + lasts) .. '|' .. value)
  call('PEXPIRE', REPLACED, digits(left))
end

-- Returns until when (ms) a lease may end, 0 of a waiter, how long (ms) its holder had to end when it was told, and the
-- owner of the newer call; nothing if there is none.
local function replaced_by(id)
  local ends, within, newer = string.match(call('HGET', REPLACED, id) or '', '^%d+|(%d+)|(%d+)|(.*)$')
  return tonumber(ends), tonumber(within), newer
end
