-- Creates a session, and never touches one that exists.
-- KEYS[1] sess:{ID}
-- ARGV    record, rev, workspace, principal, last seen (ms), life (ms), until when it has its place (ms)
-- Answers 1 when it was created, 0 when the id is taken.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], 'record', ARGV[1], 'rev', ARGV[2], 'workspace', ARGV[3], 'principal', ARGV[4],
  'last_seen', ARGV[5], 'place', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
