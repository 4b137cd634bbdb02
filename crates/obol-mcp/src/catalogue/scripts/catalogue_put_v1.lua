-- Shares a list that was listed under the lease, and ends the lease.
-- KEYS[1] catalog:{WORKSPACE}:…
-- ARGV    token, digest, items, keep (ms)
-- Answers 0 when the lease is not the token's, 1 when the list is the one from before, 2 when there was none, 3 when
-- there was another one.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then
  return 0
end
local before = redis.call('HGET', KEYS[1], 'digest')
redis.call('HSET', KEYS[1], 'listed', redis.call('HGET', KEYS[1], 'begun'))
redis.call('HDEL', KEYS[1], 'holder', 'until', 'begun')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if before == ARGV[2] then
  return 1
end
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'items', ARGV[3])
if before then
  return 3
end
return 2
