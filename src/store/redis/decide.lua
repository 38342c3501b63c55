-- Decides all charges of one request: every enforced one is made, or none. Stands after the algorithms' files,
-- whose functions it calls; the text of the whole never varies.
--
-- KEYS     one per charge, all different
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then six per charge: algorithm (a letter; b: a block, whose `beside` is the number of charges behind it
--          that are its policy's), group (0: enforced; charges with
--          the same other number are one shadow group), cost, capacity, per in us, and what the algorithm needs beside
-- Reply    integers in one string, which costs half of what an array does: the time in us, then three per charge:
--          refused until (us; 0: admitted, -1: never admitted), remaining units, when they next grow (us; 0: they
--          are as many as they get). If the request has to be held, for how long (us) at the end
-- Errors   `FOREIGN <n>`: the value of the n-th key is not ours. Whatever the error, nothing was written: all
--          reading comes before the first write, and a server that accepts a script's first write accepts the rest.

local time = ARGV[1]
if time == '' then
  time = redis.call('TIME')
  time = time[1] * 1000000 + time[2]
else
  time = tonumber(time)
end

-- How each algorithm reads a key, says when units come back, and charges.
local rules = {
  l = { log_read, log_frees, log_charge },
  s = { buckets_read, buckets_frees, buckets_charge },
  w = { window_read, window_frees, window_charge },
  t = { bucket_read, bucket_frees, bucket_charge },
  d = { line_read, line_frees, line_charge },
  b = { block_read, block_frees, block_charge },
}

-- When the units that remain become more, or 0. What was read is nil if it isn't ours.
local function grows(frees, state, capacity)
  if state.used == 0 or capacity == 0 then return 0 end
  return frees(state, math.max(1, state.used - capacity + 1))
end

local function foreign(n)
  return { err = 'FOREIGN ' .. n }
end

local asked, admitted, shadow_refused = {}, true, {}
for n = 1, #KEYS do
  local arg = n * 6 - 4
  local group, cost, capacity = ARGV[arg + 1], tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local rule = rules[ARGV[arg]]
  local read, frees, charge = rule[1], rule[2], rule[3]
  -- Each key has a time of its own: one that saw a clock run ahead must not age its neighbours.
  local beside = ARGV[arg + 5]
  local state, err = read(KEYS[n], time, tonumber(ARGV[arg + 4]), tonumber(beside) or beside)
  if not state then
    if err and not string.find(err.err, 'WRONGTYPE', 1, true) then return err end
    return foreign(n)
  end
  local refused_until = 0
  if cost > capacity or capacity == 0 then
    refused_until = -1
  elseif state.used > capacity - cost then
    refused_until = frees(state, state.used - (capacity - cost))
  end
  local grows_at = grows(frees, state, capacity)
  if not refused_until or not grows_at then return foreign(n) end
  if refused_until ~= 0 then
    if group == '0' then admitted = false else shadow_refused[group] = true end
  end
  asked[n] = {
    state = state, group = group, cost = cost, capacity = capacity, charge = charge, frees = frees,
    refused_until = refused_until, grows_at = grows_at,
    guards = ARGV[arg] == 'b' and tonumber(ARGV[arg + 5]),
  }
end

-- A block begins when one of the limits it guards is full, and is the only thing that a refusal writes. While it
-- holds it isn't prolonged.
local function takes(n)
  local ask = asked[n]
  if ask.cost == 0 then return false end
  if not ask.guards then return admitted and not shadow_refused[ask.group] end
  if ask.refused_until ~= 0 then return false end
  for m = n + 1, n + ask.guards do
    if asked[m].refused_until > 0 then return true end
  end
  return false
end

local reply, delay = integer(time), 0
for n = 1, #asked do
  local ask = asked[n]
  local state = ask.state
  if takes(n) then
    local err = ask.charge(state, ask.cost)
    if err then return err end
    ask.grows_at = grows(ask.frees, state, ask.capacity)
    if ask.group == '0' and state.delay then delay = math.max(delay, state.delay) end
  end
  local remaining = math.max(0, ask.capacity - state.used)
  reply = reply .. string.format(' %d %d %d', ask.refused_until, remaining, ask.grows_at)
end
if delay > 0 then reply = reply .. ' ' .. integer(delay) end
return reply
