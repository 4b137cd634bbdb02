-- Publishes a workspace: three documents and the invalidation, or nothing.
-- KEYS: snap:workspace:{WS}, policy:{WS}, snap:fingerprint:{WS}
-- ARGV: epoch, number, "new" or "repair", the three documents in the order of KEYS, channel, message, and the
--   fingerprint that was found to belong to a damaged publication, or ''; the most bytes of a document
-- Answers {} when it published, {epoch, number} of what is there when that forbids it.
-- MGET, since GET fails on a key that became something other than text. What is too large to be read is damaged.
local length = redis.pcall('STRLEN', KEYS[3])
local large = type(length) == 'number' and length > tonumber(ARGV[10])
local there = not large and redis.call('MGET', KEYS[3])[1]
if there and there ~= ARGV[9] then
  local ok, fingerprint = pcall(cjson.decode, there)
  local revision = ok and type(fingerprint) == 'table' and fingerprint.revision
  -- A fingerprint that cannot be read protects nothing.
  if type(revision) == 'table' and type(revision.epoch) == 'number' and type(revision.number) == 'number' then
    local epoch, number = tonumber(ARGV[1]), tonumber(ARGV[2])
    local older = revision.epoch < epoch or (revision.epoch == epoch and revision.number < number)
    local equal = revision.epoch == epoch and revision.number == number
    if not (older or (equal and ARGV[3] == 'repair')) then
      return {string.format('%.0f', revision.epoch), string.format('%.0f', revision.number)}
    end
  end
end
redis.call('SET', KEYS[1], ARGV[4])
redis.call('SET', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], ARGV[6])
redis.call('PUBLISH', ARGV[7], ARGV[8])
return {}
