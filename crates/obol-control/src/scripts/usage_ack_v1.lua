-- Acknowledges entries of a stream of usage events, and trims it up to the first one that any group still needs.
--
-- In one step, so that nobody else's reading falls between the question which one that is and the trimming.
--
-- KEYS  1 the stream
-- ARGV  1 the group, then the ids
-- Gives how many entries are left.
redis.call('XACK', KEYS[1], unpack(ARGV))
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local keep, keep_ms, keep_seq
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local of = {}
  for i = 1, #flat, 2 do
    of[flat[i]] = flat[i + 1]
  end
  local id, ms, seq
  if of.pending > 0 then
    id = redis.call('XPENDING', KEYS[1], of.name)[2]
    ms, seq = parts(id)
  else
    -- What was delivered is acknowledged, and what comes behind it was not read.
    ms, seq = parts(of['last-delivered-id'])
    seq = seq + 1
    id = string.format('%.0f-%.0f', ms, seq)
  end
  if not keep or ms < keep_ms or (ms == keep_ms and seq < keep_seq) then
    keep, keep_ms, keep_seq = id, ms, seq
  end
end
if keep then
  redis.call('XTRIM', KEYS[1], 'MINID', '=', keep)
end
return redis.call('XLEN', KEYS[1])
