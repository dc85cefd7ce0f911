-- task_of: which task a run belongs to.
--
-- run      id of a task run: id of the task "/" call under this id ":" times replaced "." times retried
--
-- If a run succeeds, its call has succeeded, and so have all runs of the call: each may have been
-- delivered twice. But if a run publishes its own retry and then returns, that run alone has finished.

local function task_of(run)
  return string.match(run, '^(.*):%d+%.%d+$') or run
end
