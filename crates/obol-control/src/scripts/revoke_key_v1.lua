-- Removes a key record for good and tells the replicas. The tombstone outlives every writer that has not heard of it.
-- KEYS: key:HASH, revoked:{key:HASH}
-- ARGV: "key" or "sessions" for what ends, life of the tombstone in seconds, channel, message
-- Answers 1 if that was news, else 0.
local told = redis.call('MGET', KEYS[2])[1]
local news = redis.call('DEL', KEYS[1]) == 1 or not told or (told ~= ARGV[1] and ARGV[1] == 'sessions')
if not news then
  return 0
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 1
