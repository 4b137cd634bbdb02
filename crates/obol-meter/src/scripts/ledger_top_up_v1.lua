-- Raises what is set aside for an open call to at least this much: in all of its budgets or in none. A refusal writes
-- nothing. Asked for the second time it raises nothing more.
--
-- KEYS  1 meta, 2 the reservation, 3 the counter of the rate, then the counter of each budget, in the windows that were
--       chosen at admission.
-- ARGV  1 now in ms ('' asks Redis), 2 amount, 3 tokens, 4 most tokens in a minute ('' for no limit), 5 the end of that
--       minute, then three for each budget: limit, the end of its window, and how long a counter is kept after it; the
--       end is '' for a budget without windows.
-- Gives {"ok"}, {"budget", position, left, ms to its next window, what of it is set aside}, {"rate", "tokens", left, ms},
--       {"lost"} or {"closed"}.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if #KEYS > 3 and redis.call('EXISTS', KEYS[1]) == 0 then
  return {'lost'}
end
local known = redis.call('HMGET', KEYS[2], 'state', 'amount', 'tokens')
if known[1] ~= 'open' then
  return {'closed'}
end
local text = function(n) return string.format('%.0f', n) end
local until_end = function(at) return text(math.max(tonumber(at) - now, 0)) end
local amount = math.max(tonumber(ARGV[2]) - tonumber(known[2]), 0)
local tokens = math.max(tonumber(ARGV[3]) - tonumber(known[3]), 0)

local used = tonumber(redis.call('HGET', KEYS[3], 'tokens') or '0')
if ARGV[4] ~= '' and tokens > 0 then
  local left = tonumber(ARGV[4]) - used
  if left < tokens then
    return {'rate', 'tokens', text(math.max(left, 0)), until_end(ARGV[5])}
  end
end
for i = 4, #KEYS do
  local arg = 5 + (i - 4) * 3
  local spent = redis.call('HMGET', KEYS[i], 'settled', 'reserved')
  local left = tonumber(ARGV[arg + 1]) - tonumber(spent[1] or '0') - tonumber(spent[2] or '0')
  if amount > 0 and amount > left then
    local ends = ARGV[arg + 2]
    return {'budget', text(i - 4), text(math.max(left, 0)), ends ~= '' and until_end(ends) or '', spent[2] or '0'}
  end
end

if amount > 0 then
  for i = 4, #KEYS do
    local arg = 5 + (i - 4) * 3
    redis.call('HINCRBY', KEYS[i], 'reserved', text(amount))
    if ARGV[arg + 2] ~= '' then
      redis.call('PEXPIREAT', KEYS[i], text(tonumber(ARGV[arg + 2]) + tonumber(ARGV[arg + 3])))
    end
  end
end
-- A minute that is long over is not counted any more.
if tokens > 0 and redis.call('EXISTS', KEYS[3]) == 1 then
  redis.call('HINCRBY', KEYS[3], 'tokens', text(tokens))
end
redis.call('HSET', KEYS[2], 'amount', text(tonumber(known[2]) + amount), 'tokens', text(tonumber(known[3]) + tokens))
return {'ok'}
