-- Removes a publication up to a revision and tells the replicas.
-- KEYS: snap:workspace:{WS}, policy:{WS}, snap:fingerprint:{WS}
-- ARGV: epoch, number, channel, message, and the fingerprint that was found to belong to a damaged publication, or '';
--   the most bytes of a document
-- Answers {} when it is gone, {epoch, number} of what is there when that is newer.
-- What is too large to be read is damaged.
local length = redis.pcall('STRLEN', KEYS[3])
local large = type(length) == 'number' and length > tonumber(ARGV[6])
local there = not large and redis.call('MGET', KEYS[3])[1]
if there and there ~= ARGV[5] then
  local ok, fingerprint = pcall(cjson.decode, there)
  local revision = ok and type(fingerprint) == 'table' and fingerprint.revision
  if type(revision) == 'table' and type(revision.epoch) == 'number' and type(revision.number) == 'number' then
    local epoch, number = tonumber(ARGV[1]), tonumber(ARGV[2])
    if revision.epoch > epoch or (revision.epoch == epoch and revision.number > number) then
      return {string.format('%.0f', revision.epoch), string.format('%.0f', revision.number)}
    end
  end
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('PUBLISH', ARGV[3], ARGV[4])
return {}
