-- skip: note that a task run did not happen because of the lock.
-- ARGV  why, owner, kept (see _runs.lua)
-- returns how many were skipped since the last success
local LOCK, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local why, owner, kept = unpack(ARGV)
note('skip', milliseconds(clock()), 0, why, owner, kept)
return tonumber(call('HGET', RUNS, 'skips') or 0)
