-- absence: why a token does not hold the lock.

local function absence(value, token)
  if call('GET', FORCED) == token then
    return 'forced'
  end
  return value and string.sub(value, 1, 32) ~= token and 'taken' or 'gone'
end
