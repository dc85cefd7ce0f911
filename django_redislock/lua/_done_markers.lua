-- done_markers: whether what an acquire is wanted for is done already.
--
-- markers  which done markers count: 1 if that of a `once` of this name does, else 0; how records are kept, see
--          _runs.lua, if it is for a task run, else ''; "|"; the id of that: what has finished under
--          this id is not done again
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
