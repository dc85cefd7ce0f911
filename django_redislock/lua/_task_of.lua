-- task_of: which task a run belongs to.
--
-- run      id of a task run: that of the task, "/", which call under this id, ":", how often it was
--          replaced, ".", how often retried. What succeeds is the call, for all its
--          runs: each may have been delivered twice. But a run that has published its retry, and then
--          ends well, has finished alone.

local function task_of(run)
  return string.match(run, '^(.*):%d+%.%d+$') or run
end
