-- Takes a place among the live sessions of a principal for a session that is about to be created. It is gone again soon
-- unless the creation makes it last. Forgets the places of expired sessions.
-- KEYS[1] sess-of:WORKSPACE:PRINCIPAL
-- ARGV    session id, life of the place until then (ms), limit
-- Answers the time (ms), or 0 when all places are taken.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- What is no set of places is in its place by mistake, and nobody could begin a session for as long as it stands there.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'zset' and kind ~= 'none' then
  redis.call('DEL', KEYS[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return 0
end
redis.call('ZADD', KEYS[1], 'GT', now + ARGV[2], ARGV[1])
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', KEYS[1], last[2])
return now
