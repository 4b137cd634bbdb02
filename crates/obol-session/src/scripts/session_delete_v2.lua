-- Deletes a session if it belongs to the caller, or is none of anybody: what stands in the place of one cannot be used.
-- KEYS[1] sess:{ID}
-- ARGV    workspace, principal, whether keys of the workspace share sessions (0 or 1)
-- Answers {0 absent | 1 deleted | 2 of another workspace | 3 of another principal, the owner's principal}.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
  return {0, ''}
end
if kind ~= 'hash' then
  redis.call('DEL', KEYS[1])
  return {1, ''}
end
local found = redis.call('HMGET', KEYS[1], 'workspace', 'principal')
if not found[1] then
  return {0, ''}
end
if found[1] ~= ARGV[1] then
  return {2, ''}
end
if found[2] ~= ARGV[2] and ARGV[3] ~= '1' then
  return {3, ''}
end
redis.call('DEL', KEYS[1])
return {1, found[2]}
