-- Looks at a ledger without its marker, before it is seeded.
--
-- KEYS  1 meta, 2 who seeds, 3 the usage stream
-- ARGV  1 a token that nobody has used, 2 for how long in ms it is kept
-- Gives nothing when the marker is there, else the token that is good until the ledger is seeded or lost again, the last
--       event that was written, and the time in ms.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {}
end
redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2])
local last = '0-0'
if redis.call('EXISTS', KEYS[3]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[3])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last = info[i + 1]
    end
  end
end
local time = redis.call('TIME')
return {redis.call('GET', KEYS[2]), last, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))}
