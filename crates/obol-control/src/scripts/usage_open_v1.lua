-- Sees to it that a stream of usage events and the group that reads it are there.
--
-- KEYS  1 the stream
-- ARGV  1 the group
-- Gives 1 when entries were trimmed that the group has not read, else 0.
local created = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if created.err and not string.find(created.err, 'BUSYGROUP', 1, true) then
  return created
end
local function fields(flat)
  local of = {}
  for i = 1, #flat, 2 do
    of[flat[i]] = flat[i + 1]
  end
  return of
end
local function less(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then
    return tonumber(a_ms) < tonumber(b_ms)
  end
  return tonumber(a_seq) < tonumber(b_seq)
end
local deleted = fields(redis.call('XINFO', 'STREAM', KEYS[1]))['max-deleted-entry-id']
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  group = fields(group)
  if group.name == ARGV[1] and less(group['last-delivered-id'], deleted) then
    return 1
  end
end
return 0
