-- Replaces the record of a session if nobody else did since it was read. Never creates one.
-- KEYS[1] sess:{ID}
-- ARGV    rev that was read, record, next rev, workspace, principal, now (ms), life (ms)
-- Answers {0 no such session of this owner | 1 saved | 2 somebody was faster, place}; `place` as in session_resume_v2.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  return {0, 0}
end
local found = redis.call('HMGET', KEYS[1], 'rev', 'workspace', 'principal', 'place')
if not found[1] or found[2] ~= ARGV[4] or found[3] ~= ARGV[5] then
  return {0, 0}
end
if found[1] ~= ARGV[1] then
  return {2, 0}
end
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[7]
local place = 0
if ends > (tonumber(found[4]) or 0) then
  place = ends + math.floor(ARGV[7] / 10)
  redis.call('HSET', KEYS[1], 'place', place)
end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'rev', ARGV[3], 'last_seen', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return {1, place}
