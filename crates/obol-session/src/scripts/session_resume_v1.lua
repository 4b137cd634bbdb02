-- Reads a session and renews its life, if it exists and belongs to the caller. Never creates one.
-- KEYS[1] sess:{ID}
-- ARGV    workspace, principal, whether keys of the workspace share sessions (0 or 1), now (ms), life (ms)
-- Answers {0 absent | 1 found | 2 of another workspace | 3 of another principal, record, rev}.
local found = redis.call('HMGET', KEYS[1], 'record', 'rev', 'workspace', 'principal')
if not found[1] then
  return {0, '', 0}
end
if found[3] ~= ARGV[1] then
  return {2, '', 0}
end
if found[4] ~= ARGV[2] and ARGV[3] ~= '1' then
  return {3, '', 0}
end
redis.call('HSET', KEYS[1], 'last_seen', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {1, found[1], found[2]}
