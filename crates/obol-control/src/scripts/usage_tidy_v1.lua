-- Forgets consumers that nothing was heard of for long and that owe nothing: each process has a name of its own.
--
-- KEYS  1 the stream
-- ARGV  1 the group, 2 for how long in ms
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local of = {}
  for i = 1, #flat, 2 do
    of[flat[i]] = flat[i + 1]
  end
  if of.pending == 0 and of.idle > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], of.name)
  end
end
return 0
