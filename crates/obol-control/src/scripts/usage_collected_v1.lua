-- Whether everything in a stream of usage events up to an entry was acknowledged.
--
-- KEYS  1 the stream
-- ARGV  1 the group, 2 the entry
-- Gives 1 or 0.
if redis.call('XLEN', KEYS[1]) == 0 then
  return 1
end
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function less(a, b)
  local a_ms, a_seq = parts(a)
  local b_ms, b_seq = parts(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local of = {}
  for i = 1, #flat, 2 do
    of[flat[i]] = flat[i + 1]
  end
  if of.name == ARGV[1] then
    if less(of['last-delivered-id'], ARGV[2]) then
      return 0
    end
    if of.pending > 0 and not less(ARGV[2], redis.call('XPENDING', KEYS[1], of.name)[2]) then
      return 0
    end
    return 1
  end
end
return 0
