-- runs: tell what became of the runs under this lock, as _runs.lua has noted it.
-- ARGV  -
-- returns {server time in ms, success or '', failure or '', skip or '', unended or '',
--          {permit "|" started, ...}, skips since the last success, abandoned or '', skipped or '',
--          {JOB "|" skips, ...}}; see _runs.lua
local RUNS = unpack(KEYS)
-- include _lease
local found, started, by_job = {}, {}, {}
local fields = redis.pcall('HGETALL', RUNS)
for i = 1, #fields, 2 do
  local permit = string.match(fields[i], '^started(.*)$')
  local entry = string.sub(fields[i + 1], 1, SIGHT)
  found[fields[i]] = entry
  if permit then
    table.insert(started, permit .. '|' .. entry)
  end
  local job = string.match(fields[i], '^skips:(.*)$')
  if job then
    table.insert(by_job, job .. '|' .. entry)
  end
end
table.sort(started)
table.sort(by_job)
return {
  digits(milliseconds(clock())),
  found.success or '',
  found.failure or '',
  found.skip or '',
  found.unended or '',
  started,
  tonumber(found.skips or 0) or 0,
  found.abandoned or '',
  found.skipped or '',
  by_job,
}
