-- Takes a place among the live sessions of a principal, if one is free. Forgets the places of expired sessions.
-- KEYS[1] sess-of:WORKSPACE:PRINCIPAL
-- ARGV    session id, life (ms), limit
-- Answers 1 when the place was taken, 0 when all are.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
