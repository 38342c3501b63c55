-- Decides all charges of one request: every enforced one is made, or none. Stands after the files of the algorithms
-- that it asks for.
--
-- KEYS     one per charge, all different
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then six per charge: algorithm (its letter), whose it is (8 x the policy's number, +1: a shadow policy,
--          +2: what the policy refuses is counted, +4: what is charged will be settled), cost, capacity, per in us,
--          and what the algorithm needs beside. For a lease, instead of the cost, for all of the policy's:
--          `cost+units wanted+ttl in us+the share of the free units that it may have, 1/n`
-- Reply    integers in one string, which costs half of what an array does: the time in us, then three per charge:
--          refused until (us; 0: admitted, -1: never admitted, -2: nobody knows), remaining units, when they next
--          grow (us; 0: they are as many as they get, or nobody knows). Then per policy that wants a lease: units
--          lent, and the last moment (us) at which they may be used. If the request has to be held, for how long (us)
--          at the end
-- Errors   `FOREIGN <n>`: the value of the n-th key is not ours. Whatever the error, nothing was written: all
--          reading comes before the first write, and a server that accepts a script's first write accepts the rest.

-- When the units that remain become more, or 0. What was read is nil if it isn't ours.
local function grows(frees, state, capacity)
  if state.used == 0 or capacity == 0 then return 0 end
  return frees(state, math.max(1, state.used - capacity + 1))
end

-- Until when `cost` units are refused, as in the reply.
local function refuses(frees, state, cost, capacity)
  if cost > capacity or capacity == 0 then return -1 end
  if state.used <= capacity - cost then return 0 end
  local frees_at = frees(state, state.used - (capacity - cost))
  return frees_at == 0 and -2 or frees_at
end

local asked, admitted, lending = {}, true, false
-- By policy: whether it refuses, and whether one of its limits is full.
local refusing, full = {}, {}
for n = 1, #KEYS do
  local arg = n * 6 - 4
  local whose, cost, capacity = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local wanted, ttl, share
  if not cost then
    cost, wanted, ttl, share = string.match(ARGV[arg + 2], '^(%d+)%+(%d+)%+(%d+)%+(%d+)$')
    cost, wanted, ttl, share = tonumber(cost), tonumber(wanted), tonumber(ttl), tonumber(share)
    lending = true
  end
  local rule, beside = rules[ARGV[arg]], ARGV[arg + 5]
  -- Each key has a time of its own: one that saw a clock run ahead must not age its neighbours.
  local state, err = rule.read(KEYS[n], time, tonumber(ARGV[arg + 4]), tonumber(beside) or beside)
  if not state then return unreadable(n, err) end
  local refused_until, grows_at = refuses(rule.frees, state, cost, capacity), grows(rule.frees, state, capacity)
  if not refused_until or not grows_at then return unreadable(n) end
  local wants = whose % 8
  local shadow = wants % 2 == 1
  local policy = whose - wants + wants % 2
  if refused_until ~= 0 then
    refusing[policy] = true
    admitted = admitted and shadow
    if refused_until ~= -1 and not rule.blocks then full[policy] = true end
  end
  state.settles = wants >= 4
  asked[n] = {
    rule = rule, state = state, policy = policy, shadow = shadow, counts = wants % 4 >= 2,
    cost = cost, capacity = capacity, refused_until = refused_until, grows_at = grows_at,
    wanted = wanted, ttl = ttl, share = share,
  }
end

-- Changes a counter as the decision wants it; true if it was charged, and perhaps an error.
local function change(ask)
  local rule, state = ask.rule, ask.state
  if ask.cost == 0 then return false end
  if rule.blocks then
    -- It begins when one of its policy's limits is full. While it holds it isn't prolonged.
    local begins = ask.refused_until == 0 and full[ask.policy]
    return begins, begins and rule.charge(state, 1)
  end
  if admitted and not (ask.shadow and refusing[ask.policy]) then return true, rule.charge(state, ask.cost) end
  if not (ask.counts and rule.press and refusing[ask.policy] and (admitted or not ask.shadow)) then return false end
  local err = rule.press(state, ask.cost, ask.capacity)
  -- Its own knock is in the way of the next.
  ask.refused_until = err and 0 or refuses(rule.frees, state, ask.cost, ask.capacity)
  return true, err
end

-- Lends what the policy whose limits begin at the n-th wants: the units, and the last moment at which they may be used.
local function lend(n)
  local first, policy, last_n = asked[n], asked[n].policy, n
  local units, last = admitted and first.wanted or 0, time + first.ttl - 1
  while asked[last_n] and asked[last_n].policy == policy do
    local ask = asked[last_n]
    -- While the clock stands behind a state, because it stepped back, nobody knows how long it is until then.
    last = ask.state.now == time and ask.rule.lends and ask.rule.lends(ask.state, last)
    if not last then return 0, 0 end
    units = math.min(units, math.floor((ask.capacity - ask.state.used) / ask.share))
    last_n = last_n + 1
  end
  if units < 1 then return 0, 0 end
  for m = n, last_n - 1 do asked[m].rule.lend(asked[m].state, units, last) end
  return units, last
end

local reply, delay = integer(time), 0
for n = 1, #asked do
  local ask = asked[n]
  local state = ask.state
  local changed, err = change(ask)
  if err then return err end
  if changed then
    ask.grows_at = grows(ask.rule.frees, state, ask.capacity)
    if state.delay and not ask.shadow then delay = math.max(delay, state.delay) end
  end
  local remaining = math.max(0, ask.capacity - state.used)
  reply = reply .. string.format(' %d %d %d', ask.refused_until, remaining, ask.grows_at)
end
if lending then
  local policy
  for n = 1, #asked do
    if asked[n].wanted and asked[n].policy ~= policy then reply = reply .. string.format(' %d %d', lend(n)) end
    policy = asked[n].policy
  end
end
if delay > 0 then reply = reply .. ' ' .. integer(delay) end
return reply
