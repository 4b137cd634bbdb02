-- Reads a publication in one step, without what is larger than anybody reads: it would only keep the server and the
-- connection busy for everybody else.
-- KEYS: snap:workspace:{WS}, policy:{WS}, snap:fingerprint:{WS}
-- ARGV: the most bytes of one document
-- Answers {which one is too large, counted from 1, or 0; the three documents}: what is too large or absent is nil.
local large, found = 0, {}
for i, key in ipairs(KEYS) do
  -- What became something other than text has no length, and is absent to MGET.
  local length = redis.pcall('STRLEN', key)
  if type(length) == 'number' and length > tonumber(ARGV[1]) then
    found[i] = false
    if large == 0 then
      large = i
    end
  else
    found[i] = redis.call('MGET', key)[1]
  end
end
return {large, found[1], found[2], found[3]}
