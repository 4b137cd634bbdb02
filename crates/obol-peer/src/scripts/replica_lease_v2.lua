-- Takes or renews the lease of a replica.
-- KEYS[1] replica:ID
-- ARGV    lease (ms), then the fields and their values
-- What is no lease is in its place by mistake, and would keep the replica without one for as long as it stands there.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then
  redis.call('DEL', KEYS[1])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
