-- stand_by: have the holder of a lease rung as soon as a newer call replaces it; see acquire_replacing.lua.
-- ARGV  token, id of the lease, ms for which this holds, mode: queue, or try if the asker cannot be rung, channel
-- returns {'replaced', ms until it must have ended, owner of the newer call}; {'busy', 0, '', 0} if it was not noted,
--         since it cannot be rung; or '' if it was, or has ended
local LOCK, REPLACED = unpack(KEYS)
-- include _lease
-- include _replaced
local token, id, lasts, mode, channel = unpack(ARGV)
local ms = milliseconds(clock())
local ends, _, newer = replaced_by(id)
if ends then
  return { 'replaced', math.max(ends - ms, 0), newer }
end
if mode ~= 'queue' then
  return { 'busy', 0, '', 0 }
end
if call('GETRANGE', LOCK, 0, 31) == token then
  keep_replaced('bell:' .. id, tonumber(lasts), ms, channel)
end
return ''
