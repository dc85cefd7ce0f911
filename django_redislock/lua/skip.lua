-- skip: note that a run did not happen: because of the lock, or because its call was given up. Or that one ended
--       that had no lease.
-- ARGV  skip, abandoned, success or failure, why or '', owner, retention (see _runs.lua)
-- returns how many were skipped since the last success
local LOCK, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _runs
local what, why, owner, retention = unpack(ARGV)
note(what, milliseconds(clock()), 0, why, owner, retention)
return tonumber(call('HGET', RUNS, 'skips') or 0)
