-- heed: what makes an acquire pointless.
--
-- heed     1 if a `once` of this name is to be respected, else 0; then the id of the task run, if
--          it is one: what has finished under this id already is not done again
-- include _task_of

local function why_pointless(heed)
  local run = string.sub(heed, 2)
  local finished = run ~= ''
    and (call('ZSCORE', FINISHED, task_of(run)) or call('ZSCORE', FINISHED, run))
  local done = string.sub(heed, 1, 1) == '1' and call('GET', DONE)
  if finished then
    return { 'finished', milliseconds(clock()) - finished }
  end
  return done and { 'done', done }
end
