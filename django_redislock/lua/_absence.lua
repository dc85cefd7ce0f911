-- absence: why a token does not hold the lock.
--
-- forced   the lease that an operator released last: id of the request(16) value of the lock. If a newer call has
--          ended it instead, "replaced" stands in place of the request.

local function absence(value, token)
  -- Changes nothing, but a server that accepts no writes refuses it: a former master must not say that
  -- a lease is gone.
  call('PEXPIRE', FORCED, 1, 'GT')
  local forced = call('GET', FORCED) or ''
  if string.sub(forced, 17, 48) == token then
    return string.sub(forced, 1, 8) == 'replaced' and 'replaced' or 'forced'
  end
  return value and string.sub(value, 1, 32) ~= token and 'taken' or 'gone'
end
