-- Replaces the record of a session if nobody else did since it was read. Never creates one.
-- KEYS[1] sess:{ID}
-- ARGV    rev that was read, record, next rev, workspace, principal, now (ms), life (ms)
-- Answers 1 when it was saved, 0 when there is no such session of this owner, 2 when somebody was faster.
local found = redis.call('HMGET', KEYS[1], 'rev', 'workspace', 'principal')
if not found[1] or found[2] ~= ARGV[4] or found[3] ~= ARGV[5] then
  return 0
end
if found[1] ~= ARGV[1] then
  return 2
end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'rev', ARGV[3], 'last_seen', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return 1
