-- Decides questions, each by itself and one after the other as if it had come alone: all enforced charges of a question
-- are made, or none. Stands after the files of the algorithms that are asked for.
--
-- KEYS     one per charge, all different within a question
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then one per charge, words with spaces between: algorithm (its letter), whose it is (16 x the policy's
--          number, +1: a shadow policy, +2: what the policy refuses is counted, +4: what is charged will be settled,
--          +8: it belongs to the same question as the charge before), cost, capacity, per in us, and what the algorithm
--          needs beside. For a lease, instead of the cost, for all of the policy's: `cost+units wanted+ttl in us+the
--          share of the free units that it may have, 1/n`. Of a question with one plain charge may follow how often it
--          is asked: more than once
-- Reply    integers in one string, which costs half of what an array does: the time in us, then per question, on a
--          line of its own from the second on, three per charge: refused until (us; 0: admitted, -1: never admitted,
--          -2: nobody knows), remaining units, when they next grow (us; 0: they are as many as they get, or nobody
--          knows); if it will be settled, a fourth: where it stands (us; 0: it was not made). Then per policy that wants
--          a lease: units lent, and the last moment (us) at which they may be used.
--          At the end, if the request has to be held, for how long (us). If it is asked more than once: how often it
--          was admitted; the first are, and the three numbers are those of the last
-- Errors   in place of a question's numbers, after a `!`; if there is but one question, as an error.
--          `FOREIGN <n>`: the value of its n-th key is not ours. Nothing was written for a question with an error: all
--          its reading comes before its first write, and a server that accepts a script's first write accepts the rest.

-- When the units that remain become more, or 0. What was read is nil if it isn't ours.
local function grows(frees, state, capacity)
  if state.used == 0 or capacity == 0 then return 0 end
  return frees(state, max(1, state.used - capacity + 1))
end

-- Until when `cost` units are refused, as in the reply.
local function refuses(frees, state, cost, capacity)
  if cost > capacity or capacity == 0 then return -1 end
  if state.used <= capacity - cost then return 0 end
  local frees_at = frees(state, state.used - (capacity - cost))
  return frees_at == 0 and -2 or frees_at
end

-- What to answer when the n-th key of a question can't be read.
local function unreadable(n, err)
  if err and not string.find(err.err, 'WRONGTYPE', 1, true) then error(err) end
  error({ err = 'FOREIGN ' .. n })
end

-- What is asked of a key. Many charges of a batch say the same.
local asks = {}
local function ask_of(text)
  local letter, whose, cost, capacity, per, beside, times =
    match(text, '^(%a) (%d+) ([%d+]+) (%d+) (%d+) (%S+) ?(%d*)$')
  local rule, wants = rules[letter], whose % 16
  local ask = {
    rule = rule, cost = tonumber(cost), capacity = tonumber(capacity), per = tonumber(per),
    beside = tonumber(beside) or beside, times = tonumber(times) or 1,
    policy = whose - wants + wants % 2, shadow = wants % 2 == 1, counts = wants % 4 >= 2, settles = wants % 8 >= 4,
    follows = wants >= 8,
  }
  if not ask.cost then
    local units, wanted, ttl, share = match(cost, '^(%d+)%+(%d+)%+(%d+)%+(%d+)$')
    ask.cost, ask.wanted, ask.ttl, ask.share = tonumber(units), tonumber(wanted), tonumber(ttl), tonumber(share)
  end
  -- What a lease is wanted beside is no plain charge.
  ask.plain = rule.adds and wants == 0 and ask.cost > 0 and not ask.wanted and type(ask.beside) == 'number'
  asks[text] = ask
  return ask
end

-- Answers a question of one plain charge, as often as it is asked.
local function plain(n, ask)
  local rule, cost, capacity, times = ask.rule, ask.cost, ask.capacity, ask.times
  local state, err = rule.read(KEYS[n], time, ask.per, ask.beside)
  if not state then unreadable(1, err) end
  local room, fit, until_us = capacity - state.used, 0, 0
  if cost <= room then
    fit = times == 1 and 1 or min(times, (room - math.fmod(room, cost)) / cost)
    err = rule.charge(state, fit * cost)
    if err then error(err) end
  end
  local grows_at = grows(rule.frees, state, capacity)
  if fit < times then
    -- One unit more is what is waited for in both cases.
    until_us = cost == 1 and capacity > 0 and grows_at or refuses(rule.frees, state, cost, capacity)
  end
  if not (grows_at and until_us) then unreadable(1) end
  local answer = format('%d %d %d', until_us, max(0, capacity - state.used), grows_at)
  return times == 1 and answer or answer .. ' ' .. fit
end

-- only for lending
-- Lends what a policy wants whose limits begin at the n-th of those asked: the units, and the last moment at which they
-- may be used.
local function lend(asked, n, admitted)
  local first, last_n = asked[n].ask, n
  local units, last = admitted and first.wanted or 0, time + first.ttl - 1
  while asked[last_n] and asked[last_n].ask.policy == first.policy do
    local ask, state = asked[last_n].ask, asked[last_n].state
    -- While the clock stands behind a state, because it stepped back, nobody knows how long it is until then.
    last = state.now == time and ask.rule.lends and ask.rule.lends(state, last)
    if not last then return 0, 0 end
    units = min(units, math.floor((ask.capacity - state.used) / ask.share))
    last_n = last_n + 1
  end
  if units < 1 then return 0, 0 end
  for at = n, last_n - 1 do
    -- What can't be charged is not lent. Of a question that costs nothing this is the first write.
    local err = asked[at].ask.rule.lend(asked[at].state, units, last)
    if err then error(err) end
  end
  return units, last
end
-- end

-- Answers any other question, with the charges from the n-th to the `last`.
local function mixed(n, last)
  local asked, admitted = {}, true
  -- By policy: whether it refuses, and whether one of its limits is full.
  local refusing, full = {}, {}
  for at = n, last do
    local ask = asks[ARGV[at + 1]]
    local rule, policy = ask.rule, ask.policy
    -- Each key has a time of its own: one that saw a clock run ahead must not age its neighbours.
    local state, err = rule.read(KEYS[at], time, ask.per, ask.beside)
    if not state then unreadable(at - n + 1, err) end
    local until_us = refuses(rule.frees, state, ask.cost, ask.capacity)
    local grows_at = grows(rule.frees, state, ask.capacity)
    if not (until_us and grows_at) then unreadable(at - n + 1) end
    if until_us ~= 0 then
      refusing[policy] = true
      admitted = admitted and ask.shadow
      if until_us ~= -1 and not rule.blocks then full[policy] = true end
    end
    state.settles = ask.settles
    asked[#asked + 1] = { ask = ask, state = state, until_us = until_us, grows_at = grows_at }
  end

  -- Changes a counter as the decision wants it; true if it was charged, and perhaps an error.
  local function change(one)
    local ask, state = one.ask, one.state
    local rule, policy = ask.rule, ask.policy
    if ask.cost == 0 then return false end
    if rule.blocks then
      -- It begins when one of its policy's limits is full. While it holds it isn't prolonged.
      local begins = one.until_us == 0 and full[policy]
      one.made = begins
      return begins, begins and rule.charge(state, 1)
    end
    if admitted and not (ask.shadow and refusing[policy]) then
      one.made = true
      return true, rule.charge(state, ask.cost)
    end
    if not (ask.counts and rule.press and refusing[policy] and (admitted or not ask.shadow)) then return false end
    local err = rule.press(state, ask.cost, ask.capacity)
    -- Its own knock is in the way of the next.
    one.until_us = err and 0 or refuses(rule.frees, state, ask.cost, ask.capacity)
    return true, err
  end

  local words, delay = {}, 0
  for at, one in ipairs(asked) do
    local ask, state = one.ask, one.state
    local changed, err = change(one)
    if err then error(err) end
    if changed then
      one.grows_at = grows(ask.rule.frees, state, ask.capacity)
      if state.delay and not ask.shadow then delay = max(delay, state.delay) end
    end
    words[at] = format('%d %d %d', one.until_us, max(0, ask.capacity - state.used), one.grows_at)
    if ask.settles then words[at] = words[at] .. ' ' .. integer(one.made and (state.stands or state.now) or 0) end
  end
  -- only for lending
  local policy
  for at, one in ipairs(asked) do
    if one.ask.wanted and one.ask.policy ~= policy then
      words[#words + 1] = format('%d %d', lend(asked, at, admitted))
    end
    policy = one.ask.policy
  end
  -- end
  if delay > 0 then words[#words + 1] = integer(delay) end
  return table.concat(words, ' ')
end

local answers, n, count = {}, 1, #KEYS
while n <= count do
  local text, last = ARGV[n + 1], n
  local ask = asks[text] or ask_of(text)
  while last < count do
    local next_text = ARGV[last + 2]
    if not (asks[next_text] or ask_of(next_text)).follows then break end
    last = last + 1
  end
  local fine, answer
  if ask.plain and last == n then fine, answer = pcall(plain, n, ask) else fine, answer = pcall(mixed, n, last) end
  if not fine then
    answer = type(answer) == 'table' and answer.err or answer
    if n == 1 and last == count then return { err = answer } end
    answer = '!' .. match(answer, '^[^\r\n]*')
  end
  answers[#answers + 1] = answer
  n = last + 1
end
if count == 0 then return integer(time) end
return integer(time) .. ' ' .. table.concat(answers, '\n')
