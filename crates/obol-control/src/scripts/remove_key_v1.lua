-- Removes a key record that nobody knows, if it is still what was found, and tells the replicas.
-- KEYS: key:HASH; ARGV: the record that was found, '' for one that is no text; channel, message
-- Answers 1 if it removed it, else 0.
local there = redis.call('MGET', KEYS[1])[1] or ''
if there ~= ARGV[1] or redis.call('DEL', KEYS[1]) == 0 then
  return 0
end
redis.call('PUBLISH', ARGV[2], ARGV[3])
return 1
