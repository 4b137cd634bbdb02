-- Puts back what a lost ledger knew: all counters and the marker, or nothing.
--
-- What late closings have booked since it was lost stays, and is part of what the caller has found: it says how much that was
-- when it looked. Who books after that makes the caller look again.
--
-- KEYS  1 meta, 2 who seeds, then the counters
-- ARGV  1 the token of the look, then three for each counter: what had been booked then, what is to be added, and when it
--       ends in ms since the epoch ('' for never).
-- Gives "seeded", "open" (somebody was faster) or "moved" (look again).
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'open'
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 'moved'
end
for i = 3, #KEYS do
  if (redis.call('HGET', KEYS[i], 'settled') or '0') ~= ARGV[2 + (i - 3) * 3] then
    return 'moved'
  end
end
for i = 3, #KEYS do
  local arg = 2 + (i - 3) * 3
  redis.call('HINCRBY', KEYS[i], 'settled', ARGV[arg + 1])
  if ARGV[arg + 2] ~= '' then
    redis.call('PEXPIREAT', KEYS[i], ARGV[arg + 2])
  end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('DEL', KEYS[2])
return 'seeded'
