-- Renews the life of a session, if it exists and belongs to the caller, and reads one field. Never creates one.
-- KEYS[1] sess:{ID}
-- ARGV    workspace, principal, whether principals of the workspace share sessions (0 or 1), now (ms), life (ms), field
--         or '', the most bytes of the field
-- Answers {0 absent | 1 found | 2 of another workspace | 3 of another principal | 4 damaged, the field, rev, place}:
-- `place` is until when the place of the session has to last from now on (ms), or 0 when the one that it has outlives it.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' then
  return {kind == 'none' and 0 or 4, '', 0, 0}
end
-- What is too large is not read.
if redis.call('HSTRLEN', KEYS[1], ARGV[6]) > tonumber(ARGV[7]) then
  return {4, '', 0, 0}
end
local found = redis.call('HMGET', KEYS[1], 'workspace', 'principal', 'rev', 'place', ARGV[6])
if not found[1] then
  return {0, '', 0, 0}
end
if found[1] ~= ARGV[1] then
  return {2, '', 0, 0}
end
if found[2] ~= ARGV[2] and ARGV[3] ~= '1' then
  return {3, '', 0, 0}
end
-- Nobody could save it, nor read it.
local rev = tostring(found[3])
if not rev:match('^%d+$') or #rev > 15 or (ARGV[6] ~= '' and not found[5]) then
  return {4, '', 0, 0}
end
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[5]
local place = 0
if ends > (tonumber(found[4]) or 0) then
  place = ends + math.floor(ARGV[5] / 10)
  redis.call('HSET', KEYS[1], 'last_seen', ARGV[4], 'place', place)
else
  redis.call('HSET', KEYS[1], 'last_seen', ARGV[4])
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {1, found[5] or '', tonumber(rev), place}
