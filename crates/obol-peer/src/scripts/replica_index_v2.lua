-- Enters a replica into the index of those that live, and drops those whose lease has run out.
-- KEYS[1] replicas: ids, the score is the end of the lease by the clock of Redis
-- ARGV    id, lease (ms)
-- Answers the ids of all that live.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- What is no index is in its place by mistake; each replica enters itself again.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'zset' and kind ~= 'none' then
  redis.call('DEL', KEYS[1])
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZRANGE', KEYS[1], 0, -1)
