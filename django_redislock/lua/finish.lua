-- finish: note how a task run ended, if no release does: the run held one permit of many, or it has
--         published its own retry.
-- ARGV  success, failure or retried, how long (ms), owner, id of the run or '', recognised_for (ms), "#" and
--       number of the permit, id of its lease, retention (see _runs.lua)
-- returns 1
local LOCK, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
-- include _task_of
local what, lasted, owner, run, recognised_for, permit, id, retention = unpack(ARGV)
local ms = milliseconds(clock())
forget(id, permit ~= '' and permit or nil)
if what ~= 'retried' then
  note(what, ms, tonumber(lasted), '', owner, retention)
end
if what ~= 'failure' and run ~= '' then
  finish(what == 'success' and task_of(run) or run, ms, recognised_for)
end
return 1
