-- Closes a reservation: the ledger moves and the usage event is written together, exactly once.
--
-- KEYS  1 the reservation, 2 open reservations, 3 calls under way, 4 the usage stream, 5 the counter of the rate,
--       then the counter of each budget, in the windows that were chosen at admission. A call that never heard which
--       were chosen is void, and names all that may be. Last of all what is known of the call's idempotency key, if it
--       has one.
-- ARGV  1 member of the open ones, 2 how: "settle", "orphan" (by whoever found it) or "void" (the call was never made),
--       3 cost, 4 tokens, 5 the event and 6 the correction of an orphaned one, each up to its cost,
--       7 how long in ms it is known that it was closed, 8 the same for an orphaned one, 9 how long a stream may be that nobody reads,
--       10 what becomes of the idempotency key: '' for a call that has none, "forgotten", "answered", "unknown" or
--       "unrecorded", 11 for how long in ms it is known ('' for as long as it would be anyway), 12 the fingerprint of the
--       request, 13 status, 14 content type and 15 body of its answer,
--       then one for each counter: for how long it is kept if nobody knows it any more ('' for ever),
--       then the events of attempts, for information.
-- Gives what was done: "settled", "orphaned", "voided", "corrected", "lost" (settled without its reservation),
--       "closed" (before).
local member, how, cost = ARGV[1], ARGV[2], ARGV[3]
local found = redis.call('HMGET', KEYS[1], 'state', 'amount', 'tokens', 'who', 'event', 'rate', 'counters')
local state, amount = found[1], found[2]

-- What is of another type ends the script here or with the event, before the ledger has moved.
redis.call('ZCARD', KEYS[2])
redis.call('HLEN', KEYS[3])
for i = 5, #KEYS do
  redis.call('HLEN', KEYS[i])
end
local record = ARGV[10] ~= '' and KEYS[#KEYS]
local last = record and #KEYS - 1 or #KEYS
local function append(event)
  redis.call('XADD', KEYS[4], '*', 'event', event)
  -- What somebody reads is trimmed behind what they have acknowledged, by them.
  if redis.call('XLEN', KEYS[4]) > tonumber(ARGV[9]) and #redis.call('XINFO', 'GROUPS', KEYS[4]) == 0 then
    redis.call('XTRIM', KEYS[4], 'MAXLEN', '~', ARGV[9])
  end
end
-- The event names what was set aside in the end, which a top-up may have raised since it was written.
local function write(event, by, spent)
  if amount then
    local overrun = tonumber(spent) > tonumber(amount)
    event = string.gsub(event, '"overrun":%a+,"reserved":%d+,"cost":$',
      '"overrun":' .. tostring(overrun) .. ',"reserved":' .. amount .. ',"cost":')
  end
  append(event .. by .. '}')
end
local function write_attempts()
  for i = 15 + last - 5 + 1, #ARGV do
    append(ARGV[i])
  end
end
local function book(by)
  for i = 6, last do
    redis.call('HINCRBY', KEYS[i], 'settled', by)
    local keep = ARGV[15 + i - 5]
    if keep ~= '' and redis.call('PTTL', KEYS[i]) == -1 then
      redis.call('PEXPIRE', KEYS[i], keep)
    end
  end
end
-- The key is another call's once its own time is over.
local function remember()
  local of = record and redis.call('HGET', record, 'call')
  if not record or (of and of ~= member) or (not of and how ~= 'settle') then
    return
  elseif ARGV[10] == 'forgotten' then
    redis.call('DEL', record)
    return
  end
  redis.call('HSET', record, 'state', ARGV[10], 'call', member)
  if ARGV[12] ~= '' then
    redis.call('HSET', record, 'fingerprint', ARGV[12])
  end
  if ARGV[10] == 'answered' then
    redis.call('HSET', record, 'status', ARGV[13], 'type', ARGV[14], 'body', ARGV[15])
  end
  if ARGV[11] ~= '' then
    redis.call('PEXPIRE', record, ARGV[11])
  end
end
local function mark(closed, ms, booked)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'state', closed, 'amount', booked)
  redis.call('PEXPIRE', KEYS[1], ms)
  redis.call('ZREM', KEYS[2], member)
  remember()
end
-- What was set aside, and the place among those under way.
local function release(tokens)
  if amount ~= '0' then
    for _, counter in ipairs(cjson.decode(found[7])) do
      redis.call('HINCRBY', counter, 'reserved', '-' .. amount)
    end
  end
  if redis.call('HINCRBY', KEYS[3], found[4], -1) <= 0 then
    redis.call('HDEL', KEYS[3], found[4])
  end
  if redis.call('EXISTS', found[6]) == 1 then
    redis.call('HINCRBY', found[6], 'tokens', string.format('%.0f', tokens - tonumber(found[3])))
  end
end

if state == 'open' then
  if how == 'void' then
    mark('voided', ARGV[7], '0')
    release(0)
    return 'voided'
  elseif how == 'orphan' then
    write(found[5], amount, amount)
    mark('orphaned', ARGV[8], amount)
    release(tonumber(found[3]))
    book(amount)
    return 'orphaned'
  end
  write(ARGV[5], cost, cost)
  write_attempts()
  mark('settled', ARGV[7], cost)
  release(tonumber(ARGV[4]))
  book(cost)
  return 'settled'
elseif state == 'orphaned' and how == 'settle' then
  local by = string.format('%.0f', tonumber(cost) - tonumber(amount))
  write(ARGV[6], by, cost)
  write_attempts()
  mark('settled', ARGV[7], cost)
  book(by)
  return 'corrected'
elseif state or how == 'orphan' then
  redis.call('ZREM', KEYS[2], member)
  return 'closed'
elseif how == 'void' then
  -- The reservation may still be on its way.
  mark('voided', ARGV[7], '0')
  return 'voided'
end
write(ARGV[5], cost, cost)
write_attempts()
mark('settled', ARGV[7], cost)
book(cost)
return 'lost'
