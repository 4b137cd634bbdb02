-- Removes a key record that nobody knows, if it is still what was found, and tells the replicas.
-- KEYS: key:HASH
-- ARGV: the record that was found, '' for one that is no text or too large to be read; channel, message, the most bytes of
--   a record
-- Answers 1 if it removed it, else 0.
local length = redis.pcall('STRLEN', KEYS[1])
local large = type(length) == 'number' and length > tonumber(ARGV[4])
local there = not large and redis.call('MGET', KEYS[1])[1] or ''
if there ~= ARGV[1] or redis.call('DEL', KEYS[1]) == 0 then
  return 0
end
redis.call('PUBLISH', ARGV[2], ARGV[3])
return 1
