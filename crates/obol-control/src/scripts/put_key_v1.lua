-- Writes a key record and tells the replicas, unless the same record is there: healing writes all keys again and
-- must not empty the caches of every replica each time.
-- KEYS: key:HASH; ARGV: record, channel, message. Answers 1 if it wrote, else 0.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[3])
return 1
