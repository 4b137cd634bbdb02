-- Creates a publication and tells the replicas, if there is nothing of one: whatever is there wins, part of one too.
-- KEYS: snap:workspace:{WS}, policy:{WS}, snap:fingerprint:{WS}
-- ARGV: the three documents in the order of KEYS, channel, message
-- Answers 1 if it created, else 0.
if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) > 0 then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
return 1
