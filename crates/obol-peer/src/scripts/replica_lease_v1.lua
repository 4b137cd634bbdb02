-- Takes or renews the lease of a replica.
-- KEYS[1] replica:ID
-- ARGV    lease (ms), then the fields and their values
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
