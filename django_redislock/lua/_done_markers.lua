-- done_markers: whether the work for which a lock is wanted is done already.
--
-- markers  which done markers to look at: once(1) retention "|" run
--          once: 1 to look at the one of a `once` of this name, else 0
--          retention: of a run, how its records are kept, see _runs.lua; else ''
--          run: id of a task run, or '' if it has none: under one id, work is finished once
-- include _task_of

local function already_done(markers)
  local once, run = string.match(markers, '^(.)[^|]*|(.*)$')
  local finished = run ~= ''
    and (call('ZSCORE', FINISHED, task_of(run)) or call('ZSCORE', FINISHED, run))
  local done = once == '1' and call('GET', DONE)
  if finished then
    return { 'finished', milliseconds(clock()) - finished }
  end
  return done and { 'done', done, milliseconds(clock()) }
end
