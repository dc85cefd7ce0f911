-- acquire: ask for the lock: first try, resend, look, confirmation and last look alike.
-- KEYS  all of them with done markers; without, those up to HELD
-- ARGV  token, id, ttl (ms), mode, ticket, markers, renews, owner, channel
--       mode: try (do not queue), queue, last (leave the queue if not granted), pause (queue before all others; a
--       grant there needs no confirmation: see _queue.lua)
--       ticket: place in the queue to go back to, 0 for a new one
--       markers: which done markers make it pointless, see _done_markers.lua; '' for none
--       renews: r or -, see _lease.lua
-- returns the fence, if it is granted; or
--         {'queued', ticket, ms until the current lease must have ended, server time in us, 1 if newly queued,
--           owner of that lease}
--         {'busy', ms until the current lease must have ended, value of lock or its beginning, server time in ms}
--         {'done', value of done, server time in ms} or {'finished', ms since}, if it is pointless; or
--         {'endless'}, if the key has no expiry, so that a wait for it would never end
local LOCK, QUEUE, FENCE, PAST, HELD, DONE, FINISHED, RUNS, RAN = unpack(KEYS)
-- include _lease
-- include _grant
local token, id, ttl, mode, ticket, markers, renews, owner, channel = unpack(ARGV)
local limit, permit, refusal, pause_left, popped = '', '', 'busy' -- of a lock with one permit: acquire_permit.lua
-- include _acquire
