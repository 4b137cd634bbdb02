-- Removes a key record and tells the replicas, if there is one.
-- KEYS: key:HASH; ARGV: channel, message. Answers 1 if there was one, else 0.
if redis.call('DEL', KEYS[1]) == 0 then
  return 0
end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 1
