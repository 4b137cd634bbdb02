-- Writes a key record and tells the replicas, unless the same one is there, a newer one, or the key was revoked: whoever
-- read the records a moment ago must not undo what happened since.
-- KEYS: key:HASH, revoked:{key:HASH}
-- ARGV: record, its revision, channel, message, the record that was found to be damaged, or '', and the most bytes of a
--   record
-- Answers 1 if it wrote, else 0.
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
-- What is too large to be read is damaged.
local length = redis.pcall('STRLEN', KEYS[1])
local large = type(length) == 'number' and length > tonumber(ARGV[6])
local there = not large and redis.call('MGET', KEYS[1])[1]
if there == ARGV[1] then
  return 0
end
if there and there ~= ARGV[5] then
  local ok, record = pcall(cjson.decode, there)
  if ok and type(record) == 'table' and type(record.revision) == 'number' and record.revision >= tonumber(ARGV[2]) then
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 1
