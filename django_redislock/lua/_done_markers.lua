-- done_markers: whether what an acquire is wanted for is done already.
--
-- markers  which done markers count: 1 if that of a `once` of this name does, else 0; then the id of
--          the task run, if it is one: what has finished under this id is not done again
-- include _task_of

local function already_done(markers)
  local run = string.sub(markers, 2)
  local finished = run ~= ''
    and (call('ZSCORE', FINISHED, task_of(run)) or call('ZSCORE', FINISHED, run))
  local done = string.sub(markers, 1, 1) == '1' and call('GET', DONE)
  if finished then
    return { 'finished', milliseconds(clock()) - finished }
  end
  return done and { 'done', done, milliseconds(clock()) }
end
