-- Prolongs the lease on listing.
-- KEYS[1] catalog:{WORKSPACE}:…
-- ARGV    token, lease (ms)
-- Answers 1, or 0 when the lease is not the token's.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'until', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
return 1
