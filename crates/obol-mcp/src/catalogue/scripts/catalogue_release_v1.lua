-- Ends the lease on listing without a list.
-- KEYS[1] catalog:{WORKSPACE}:…
-- ARGV    token
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'holder', 'until', 'begun')
end
return 1
