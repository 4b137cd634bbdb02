-- Admits a call, or says why not: all budgets and limits or none. A refusal writes nothing.
--
-- KEYS  1 meta, 2 the reservation, 3 open reservations, 4 calls under way,
--       5 the usage stream, 6-8 the rate in the previous, this and the next minute, then three for each budget: its previous, current and
--       next window. The clock of Redis chooses; replicas' clocks only name the windows. Last of all what is known of
--       the call's idempotency key, if it has one.
-- ARGV  1 member of the open ones ("owner id"), 2 now in ms ('' asks Redis), 3 ms until the reservation is overdue,
--       4 who, 5 most calls at once, 6 most requests and 7 most tokens in a minute ('' for no limit), 8 tokens,
--       9 the start of this minute, 10 amount, 11 the event if nobody settles, up to its cost,
--       12 the fingerprint of the request if it has an idempotency key and 13 for how long in ms that is known,
--       14 how many entries the stream may have when somebody reads it,
--       then six for each budget: limit, the starts of its previous, current and next window, the end of the next,
--       and how long a counter is kept after its window; the starts are '' for a budget without windows.
-- Gives {"ok", chosen windows, requests left, tokens left, ms to the next minute}, {"budget", position, left, ms to its
--       next window, what of it is set aside}, {"rate", what, left, ms}, {"busy"}, {"full"}, {"lost"}, {"clock"}, {"closed"}, and
--       of an idempotency key that is known {"answered", status, content type, body}, {"repeated", "open" or "unknown" or
--       "unrecorded" or "other" (request)}.
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local record = ARGV[12] ~= '' and KEYS[#KEYS]
local budgets = math.floor((#KEYS - 8) / 3)
if budgets > 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  return {'lost'}
end
local text = function(n) return string.format('%.0f', n) end
local minute = tonumber(ARGV[9])
local late = math.floor((now - minute) / 60000)
if late < -1 or late > 1 then
  return {'clock'}
end
local reset = text(minute + (late + 1) * 60000 - now)
-- Asked for the second time, since the first answer was lost: it stands.
local known = redis.call('HMGET', KEYS[2], 'state', 'windows')
if known[1] == 'open' then
  return {'ok', known[2], '', '', reset}
elseif known[1] then
  return {'closed'}
end
if record then
  local before = redis.call('HMGET', record, 'state', 'fingerprint', 'status', 'type', 'body')
  if before[1] and before[2] ~= ARGV[12] then
    return {'repeated', 'other'}
  elseif before[1] == 'answered' then
    return {'answered', before[3], before[4], before[5]}
  elseif before[1] then
    return {'repeated', before[1]}
  end
end

-- Somebody reads the stream and has not read all of this: it is not forgotten for the sake of more. One that nobody reads is
-- trimmed by whoever writes to it.
local waiting = redis.pcall('XLEN', KEYS[5])
if type(waiting) == 'number' and waiting >= tonumber(ARGV[14]) and #redis.call('XINFO', 'GROUPS', KEYS[5]) > 0 then
  return {'full'}
end

-- What is of another type ends the script here, before anything is written.
redis.call('ZCARD', KEYS[3])
redis.call('HLEN', KEYS[4])
local who, tokens, amount = ARGV[4], tonumber(ARGV[8]), tonumber(ARGV[10])
if ARGV[5] ~= '' and tonumber(redis.call('HGET', KEYS[4], who) or '0') >= tonumber(ARGV[5]) then
  return {'busy'}
end
local rate_key = KEYS[7 + late]
local rate = redis.call('HMGET', rate_key, 'requests', 'tokens')
local requests_left, tokens_left = '', ''
if ARGV[6] ~= '' then
  local left = tonumber(ARGV[6]) - tonumber(rate[1] or '0')
  if left < 1 then
    return {'rate', 'requests', text(math.max(left, 0)), reset}
  end
  requests_left = text(left - 1)
end
if ARGV[7] ~= '' then
  local left = tonumber(ARGV[7]) - tonumber(rate[2] or '0')
  if tokens > 0 and left < tokens then
    return {'rate', 'tokens', text(math.max(left, 0)), reset}
  end
  tokens_left = text(left - tokens)
end
local windows, counters = text(1 + late), {}
for i = 1, budgets do
  local arg, key = 14 + (i - 1) * 6, 8 + (i - 1) * 3
  local chosen, ends = 1, nil
  if ARGV[arg + 2] ~= '' then
    local previous, current = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
    local following, last = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5])
    if now < previous or now >= last then
      return {'clock'}
    elseif now < current then
      chosen, ends = 0, current
    elseif now < following then
      ends = following
    else
      chosen, ends = 2, last
    end
  end
  local counter = KEYS[key + 1 + chosen]
  local spent = redis.call('HMGET', counter, 'settled', 'reserved')
  local left = tonumber(ARGV[arg + 1]) - tonumber(spent[1] or '0') - tonumber(spent[2] or '0')
  if amount > 0 and amount > left then
    return {'budget', text(i - 1), text(math.max(left, 0)), ends and text(ends - now) or '', spent[2] or '0'}
  end
  windows = windows .. text(chosen)
  counters[i] = {counter, ends and ends + tonumber(ARGV[arg + 6])}
end

local names = {}
for i, counter in ipairs(counters) do
  redis.call('HINCRBY', counter[1], 'reserved', ARGV[10])
  if counter[2] then
    redis.call('PEXPIREAT', counter[1], text(counter[2]))
  end
  names[i] = counter[1]
end
redis.call('HINCRBY', rate_key, 'requests', 1)
redis.call('HINCRBY', rate_key, 'tokens', ARGV[8])
redis.call('PEXPIRE', rate_key, 180000)
redis.call('HINCRBY', KEYS[4], who, 1)
redis.call('HSET', KEYS[2], 'state', 'open', 'at', text(now), 'amount', ARGV[10], 'tokens', ARGV[8], 'who', who,
  'windows', windows, 'rate', rate_key, 'counters', cjson.encode(names), 'event', ARGV[11])
if record then
  redis.call('HSET', KEYS[2], 'record', record)
  redis.call('HSET', record, 'state', 'open', 'call', ARGV[1], 'fingerprint', ARGV[12])
  redis.call('PEXPIRE', record, ARGV[13])
end
redis.call('ZADD', KEYS[3], text(now + tonumber(ARGV[3])), ARGV[1])
return {'ok', windows, requests_left, tokens_left, reset}
