-- Reads a list that replicas share and, when it is too old and nobody lists it, takes the lease on listing it.
-- KEYS[1] catalog:{WORKSPACE}:…
-- ARGV    known digest or '', ttl (ms), ms since a change was announced or -1, token, lease (ms), keep (ms)
-- Answers turn (0 nobody, 1 ours, 2 another's), what is left of its lease (ms), digest or '', age (ms), items or ''.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', KEYS[1], 'digest', 'listed', 'holder', 'until')
local listed, ends = tonumber(stored[2]), tonumber(stored[4])

local oldest = now - ARGV[2]
if tonumber(ARGV[3]) >= 0 then
  -- Times are cut to milliseconds: a listing that began in the very one of the announcement does not count.
  oldest = math.max(oldest, now - ARGV[3] + 1)
end
local turn, left = 1, 0
-- A listing from the future was made before the clock was set back: how old it is, nobody knows.
if listed and listed >= oldest and listed <= now then
  turn = 0
elseif stored[3] and stored[3] ~= ARGV[4] and ends and ends > now and ends <= now + 600000 then
  turn, left = 2, ends - now
else
  redis.call('HSET', KEYS[1], 'holder', ARGV[4], 'until', now + ARGV[5], 'begun', now)
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end

local digest, items = stored[1] or '', ''
if digest ~= '' and digest ~= ARGV[1] then
  items = redis.call('HGET', KEYS[1], 'items')
end
return { turn, left, digest, listed and math.max(now - listed, 0) or 0, items }
