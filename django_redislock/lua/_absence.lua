-- absence: why a token does not hold the lock.
--
-- forced   the lease that an operator released last: id of the request(16) value of the lock

local function absence(value, token)
  -- Changes nothing, but a server that accepts no writes refuses it: a former master must not say that
  -- a lease is gone.
  call('PEXPIRE', FORCED, 1, 'GT')
  if string.sub(call('GET', FORCED) or '', 17, 48) == token then
    return 'forced'
  end
  return value and string.sub(value, 1, 32) ~= token and 'taken' or 'gone'
end
