-- calls: tell of the calls under this lock that have no lease now.
-- ARGV  id of a task, to tell of its call alone, or ''; how many deferred runs to name
-- returns {server time in ms, until(ms) "|" id of the task that waits in the broker's queue or '',
--          when(ms) that one may run, or '' or 0 if nobody knows,
--          until(ms) "|" when(ms) "|" owner of the run that a `once` has done, or '',
--          when(ms) the task has succeeded or '',
--          {{ticket, id, when(ms) it must be back, how many stand before it}, ...},
--          id "|" name of the task of the call that waits, with more behind another "|"; or ''}
-- It compares no times: entries that are over may still be there. See announce.lua,
-- stand_in_line.lua, _runs.lua.
local RUNS, LINE, DUE, DONE, FINISHED = unpack(KEYS)
-- include _lease
local id, most = unpack(ARGV)
local ms = milliseconds(clock())
local queued, terms = call('HGET', RUNS, 'queued') or '', call('HGET', RUNS, 'terms') or ''
local done, finished = call('GET', DONE) or '', ''
if done ~= '' then
  done = digits(ms + call('PTTL', DONE)) .. '|' .. string.sub(done, 1, SIGHT)
end
local named = { id }
if id == '' then
  named = call('ZRANGE', LINE, 0, most - 1)
else
  -- As _task_of.lua writes it down. A call whose id the program chose has more behind the slash.
  finished = call('ZSCORE', FINISHED, id .. '/') or ''
end
local deferred = {}
for _, one in ipairs(named) do
  local ticket, due = call('ZSCORE', LINE, one), call('ZSCORE', DUE, one)
  if ticket and due then
    local before = call('ZCOUNT', LINE, '-inf', digits(ticket - 1))
    table.insert(deferred, { digits(ticket), one, digits(due), before })
  end
end
return { digits(ms), queued, string.match(terms, '^%d+') or '', done, finished, deferred, call('HGET', RUNS, 'task') or '' }
