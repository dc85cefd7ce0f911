-- Publishes *words* on *channel*, and returns how many clients receive them. On a cluster the channel has the
-- hash tag of the keys: PUBLISH would go to all nodes there, and count the clients of this node alone.
-- Replicas are not told, because a waiter may still listen to a former master. It is not counted here, so the
-- lock goes to the next waiter, and both would take it. (The bus of a cluster tells replicas all the same, but
-- a former master has unsubscribed its clients there.)
local function ring(channel, words)
  redis.set_repl(redis.REPL_NONE)
  local heard
  if string.find(channel, '{', 1, true) then
    heard = call('SPUBLISH', channel, words)
  else
    heard = call('PUBLISH', channel, words)
  end
  redis.set_repl(redis.REPL_ALL)
  return heard
end
