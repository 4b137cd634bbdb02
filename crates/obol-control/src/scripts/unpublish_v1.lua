-- Removes a publication and tells the replicas.
-- KEYS: snap:workspace:{WS}, policy:{WS}, snap:fingerprint:{WS}; ARGV: channel, message
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 1
