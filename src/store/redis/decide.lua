-- Decides requests one after the other, each as if it had come alone. Either all enforced charges
-- of a request are made, or none. In a program, this file follows those of the algorithms.
--
-- KEYS     one per charge, all different within a request. In a program with overrides, then one
--          more per charge: the key of its override; of a charge without overrides, its own key
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then one text per charge, with fields separated by spaces:
--            the letter of the algorithm
--            32 x the number of the policy, plus options: 1 the policy is shadow, 2 it counts
--            rejected requests, 4 the charge will be settled, 8 the charge belongs to the same
--            request as the charge before, 16 the response counter: only read; while
--            it is full, a refusal starts the block of its policy
--            cost; with a lease `cost+requested units+ttl in us+divisor`, the same for all charges
--            of a policy: at most 1/divisor of the free units is granted
--            capacity
--            the period in us
--            the parameters of the algorithm; if overrides apply to the charge,
--            `parameters|largest amount|max_delay in us|name of the limit`
--            optional, for a request with one mergeable charge: how often it is repeated, above 1
-- Reply    integers in one string, which costs half as much as an array: the time in us, then the
--          first request on the same line, and each other request on its own line. Per charge:
--            only if overrides apply to it: requests and burst of its override (-1 0: none, -2 0:
--            unlimited, so nothing is charged, -3 0: blocked, -5 0: none, but the key of the
--            override has another value); -4 and its expiry (ms) before them, if it has one
--            refused until (us; 0: admitted, -1: never admitted, -2: unknown)
--            remaining units
--            when they next grow (us; 0: never or unknown)
--            only for a charge that will be settled: the time of the charge (us; 0: not charged)
--          Then per policy that requests a lease: granted units, and the last moment (us) at which
--          they may be used. At the end, if the request must be delayed: for how long (us).
--          A repeated request has the admitted count as a fourth number. The first repetitions are
--          the admitted ones; the three numbers describe the last repetition.
-- Errors   replace the numbers of a request, after a `!`. With only one request the reply is the
--          error. `FOREIGN <n>`: the n-th key of the request holds a foreign value.
--          A request with an error wrote nothing: it reads everything before its first write, and
--          Redis accepts all writes of a script after the first.

-- Returns when the remaining units next grow (us). 0: never or unknown; nil: the value is foreign.
local function next_growth_time(release_time, state, capacity)
  if state.used_units == 0 or capacity == 0 then return 0 end
  local growth_us, lead = release_time(state, max(1, state.used_units - capacity + 1)), state.now - time
  return growth_us and lead > state.per and max(0, growth_us - lead) or growth_us
end

-- Until when `cost` units are refused, as in the reply. If the clock stepped back by more than the
-- period, the time of the state would stand still for that long. Lets the key expire as if its time
-- went on from now.
local function refused_until(release_time, state, cost, capacity)
  if cost > capacity or capacity == 0 then return -1 end
  if state.used_units <= capacity - cost then return 0 end
  local free_at, lead = release_time(state, state.used_units - (capacity - cost)), state.now - time
  if lead > state.per and free_at then
    local expires, server_time = release_time(state, 0) - lead, call('TIME')
    local expires_ms = math.ceil(expires / 1000)
    if call('PTTL', state.key) > expires_ms - server_time[1] * 1000 - server_time[2] / 1000 then
      -- An error leaves the later expiry.
      try('PEXPIREAT', state.key, integer(expires_ms))
    end
    free_at = min(free_at, expires)
  end
  return free_at == 0 and -2 or free_at
end

-- Raises the error for the n-th key of a request, which can't be read.
local function raise_foreign_key(n, err)
  if err and not find(err.err, 'WRONGTYPE', 1, true) then error(err) end
  error({ err = 'FOREIGN ' .. n })
end

-- Parsed charges by their text. Many charges of a batch have the same text.
local parsed_charges = {}
local function parse_charge(text)
  local letter, group, cost, capacity, per, parameters, repeat_count =
    match(text, '^(%a) (%d+) ([%d+]+) (%d+) (%d+) (%S+) ?(%d*)$')
  local rule, options = rules[letter], group % 32
  local charge = {
    rule = rule, cost = tonumber(cost), capacity = tonumber(capacity), per = tonumber(per),
    parameters = tonumber(parameters) or parameters, repeat_count = tonumber(repeat_count) or 1,
    policy = group - options + options % 2, is_shadow = options % 2 == 1, counts_rejected = options % 4 >= 2,
    settles = options % 8 >= 4, follows = options % 16 >= 8, is_counted = options >= 16,
  }
  if not charge.cost then
    local units, requested, ttl, divisor = match(cost, '^(%d+)%+(%d+)%+(%d+)%+(%d+)$')
    charge.cost, charge.requested_units, charge.ttl, charge.divisor =
      tonumber(units), tonumber(requested), tonumber(ttl), tonumber(divisor)
  end
  -- section: overrides
  local bar = find(parameters, '|', 1, true)
  if bar then
    local plain = string.sub(parameters, 1, bar - 1)
    charge.parameters, charge.letter = tonumber(plain) or plain, letter
    charge.override_parameters, charge.override_words = parameters, '-1 0 '
  end
  -- end section
  -- A charge with a lease is not mergeable.
  charge.is_mergeable = rule.is_additive and options == 0 and charge.cost > 0 and not charge.requested_units
    and type(charge.parameters) == 'number'
  -- section: calendars
  if letter == 'p' then
    charge.is_mergeable = options == 0 and charge.cost > 0 and not charge.requested_units
  end
  -- end section
  parsed_charges[text] = charge
  return charge
end

-- section: overrides
-- The overrides of all charges, read at once, because each call from Lua costs more than the reading.
-- MGET reads a value of another type as none. GET tells that there is one: it reads the override of
-- all charges if they have the same key.
local override_values, has_one_key = {}, #ARGV > 1
for n = #ARGV + 1, #KEYS do has_one_key = has_one_key and KEYS[n] == KEYS[#ARGV] end
if has_one_key then
  local value = try('GET', KEYS[#ARGV])
  if type(value) == 'table' then
    if not find(value.err, 'WRONGTYPE', 1, true) then return value end
    value = ''
  end
  for n = 1, #ARGV - 1 do override_values[n] = value end
elseif #ARGV > 1 then
  override_values = call('MGET', unpack(KEYS, #ARGV))
end

-- The charge under an override, `RULE[@EXPIRES_MS]`: `*` unlimited, `!` blocked, else
-- `name=requests[+burst],..`. It has only what differs from the charge. nil: the text is no override.
local function make_variant(charge, rule)
  local variant = setmetatable({}, charge.metatable)
  local at, expiry = find(rule, '@', 1, true), ''
  if at then
    local expires_ms = tonumber(match(rule, '^%d+$', at + 1))
    if not expires_ms then return end
    -- Later times are not exact: such an override has no end.
    if expires_ms <= 9007199254739 then
      -- Redis keeps a key through the whole millisecond of its expiry.
      variant.ends_at, variant.after = max(time + 1, (expires_ms + 1) * 1000), charge
      expiry = format('-4 %d ', expires_ms)
    end
    rule = string.sub(rule, 1, at - 1)
  end
  if rule == '' then return end
  if rule == '*' then
    variant.is_unlimited, variant.cost, variant.capacity, variant.ends_at = true, 0, 0, nil
    variant.override_words = expiry .. '-2 0 '
    variant.requested_units = charge.requested_units and 0
    return variant
  end
  if charge.rule.is_block then return charge end
  if rule == '!' then
    variant.capacity, variant.override_words = 0, expiry .. '-3 0 '
    return variant
  end
  if not find(rule, '=', 1, true) then return end
  local max_amount, max_delay, limit_name = match(charge.override_parameters, '|(%d+)|(%d+)|(.+)$')
  local _, last = find(',' .. rule, ',' .. limit_name .. '=', 1, true)
  local requests, burst
  if last then requests, burst = match(rule, '^(%d+)%+?(%d*)', last) end
  if not requests then return charge end
  max_amount = tonumber(max_amount)
  burst = min(tonumber(burst) or tonumber(requests), max_amount)
  requests = min(tonumber(requests), max_amount)
  variant.capacity = requests
  if charge.letter == 't' then
    variant.capacity = requests > 0 and burst or 0
    local warm_up = type(charge.parameters) == 'string' and match(charge.parameters, '^%d+%+(%d+)%+')
    variant.parameters = not warm_up and requests
      or format('%d+%s+%d', requests, warm_up, burst - min(burst, max(1, math.floor(burst / 3))))
  elseif charge.letter == 'd' then
    local queue = tonumber(max_delay) * requests
    local rest = math.fmod(queue, charge.per)
    variant.capacity = requests > 0 and (queue - rest) / charge.per + 1 or 0
    variant.parameters = format('%d+%d', requests, rest)
  end
  variant.override_words = format('%s%d %d ', expiry, requests, burst)
  return variant
end

-- The n-th charge under the override of its key, if it has one. Every call reads the overrides, so
-- a change holds from the next decision. A value without a rule is none, and the reply says so.
local function apply_override(n, charge)
  local value = charge.override_words and override_values[n]
  if not value then return charge end
  local rule = match(value, '^[^ ]+') or ''
  if not charge.variants then charge.variants, charge.metatable = {}, { __index = charge } end
  local variant = charge.variants[rule]
  if not variant then
    variant = make_variant(charge, rule) or setmetatable({ override_words = '-5 0 ' }, charge.metatable)
    charge.variants[rule] = variant
  end
  return variant
end

-- The times of a status, if they are not before the end of the override: from then on the limit without
-- it applies.
local function apply_override_end(key, charge, until_us, growth_us, remaining)
  local ends_at, after = charge.ends_at, charge.after
  local is_late, grows_late = until_us == -1 or until_us >= ends_at, growth_us == 0 or growth_us >= ends_at
  local state = (is_late or grows_late) and after.rule.read(key, time, after.per, after.parameters)
  if not state then return until_us, growth_us end
  local later_until = refused_until(after.rule.release_time, state, charge.cost, after.capacity)
  local later_growth = next_growth_time(after.rule.release_time, state, after.capacity)
  if is_late and later_until then until_us = later_until == -1 and -1 or max(ends_at, later_until) end
  if grows_late and later_growth then
    growth_us = after.capacity - state.used_units > remaining and ends_at
      or later_growth > 0 and max(ends_at, later_growth) or 0
  end
  return until_us, growth_us
end
-- end section

-- Decides a request with one mergeable charge, for all its repetitions.
local function decide_mergeable(n, charge)
  -- section: overrides
  charge = apply_override(n, charge)
  if charge.is_unlimited then
    return charge.override_words .. '0 0 0' .. (charge.repeat_count > 1 and ' ' .. charge.repeat_count or '')
  end
  -- end section
  local rule, cost, capacity, repeat_count = charge.rule, charge.cost, charge.capacity, charge.repeat_count
  local state, err = rule.read(KEYS[n], time, charge.per, charge.parameters)
  if not state then raise_foreign_key(1, err) end
  local available, admitted_count, until_us = capacity - state.used_units, 0, 0
  if cost <= available then
    admitted_count = repeat_count == 1 and 1 or min(repeat_count, (available - math.fmod(available, cost)) / cost)
    err = rule.charge(state, admitted_count * cost)
    if err then error(err) end
  end
  local growth_us = next_growth_time(rule.release_time, state, capacity)
  if admitted_count < repeat_count then
    -- With cost 1, the next free unit ends the refusal, too.
    until_us = cost == 1 and capacity > 0 and state.now == time and growth_us
      or refused_until(rule.release_time, state, cost, capacity)
  end
  if not (growth_us and until_us) then raise_foreign_key(1) end
  local remaining = max(0, capacity - state.used_units)
  -- section: overrides
  if charge.ends_at then
    until_us, growth_us = apply_override_end(KEYS[n], charge, until_us, growth_us, remaining)
  end
  -- end section
  local answer = format('%d %d %d', until_us, remaining, growth_us)
  -- section: overrides
  answer = (charge.override_words or '') .. answer
  -- end section
  return repeat_count == 1 and answer or answer .. ' ' .. admitted_count
end

-- section: leases
-- Grants the lease of the policy with charges from the n-th on. Returns the units, and the last
-- moment at which they may be used.
local function grant_lease(entries, n, admitted)
  local first, next_n = entries[n].charge, n
  local units, last = admitted and first.requested_units or 0, time + first.ttl - 1
  if units < 1 then return 0, 0 end
  while entries[next_n] and entries[next_n].charge.policy == first.policy do
    local charge, state = entries[next_n].charge, entries[next_n].state
    -- If the clock stepped back behind a state, the time until `last` is unknown.
    last = state.now == time and charge.rule.grantable_until and charge.rule.grantable_until(state, last)
    if not last then return 0, 0 end
    units = min(units, math.floor((charge.capacity - state.used_units) / charge.divisor))
    next_n = next_n + 1
  end
  if units < 1 then return 0, 0 end
  for index = n, next_n - 1 do
    -- An error ends the request: units that can't be charged must not be granted. This is the first
    -- write of a request with cost 0.
    local err = entries[index].charge.rule.grant(entries[index].state, units, last)
    if err then error(err) end
  end
  return units, last
end
-- end section

-- Decides any other request, with the charges from the n-th to the `last`.
local function decide_request(n, last)
  local entries, admitted = {}, true
  -- By policy: whether it refuses the request, and whether one of its limits is full.
  local is_refusing, is_full, has_clock_stepped_back = {}, {}, false
  -- By policy that counts responses: whether those counted fill a limit.
  local is_counted_full = {}
  for index = n, last do
    local charge = parsed_charges[ARGV[index + 1]]
    local rule, policy = charge.rule, charge.policy
    local state, until_us, growth_us, err
    -- section: overrides
    charge = apply_override(index, charge)
    if charge.is_unlimited then
      state, until_us, growth_us = { used_units = 0, now = time }, 0, 0
    end
    -- end section
    if not state then
      -- The state of a key may have a later time than `time`, from a clock that ran ahead. That
      -- later time does not apply to the other keys.
      state, err = rule.read(KEYS[index], time, charge.per, charge.parameters)
      if not state then raise_foreign_key(index - n + 1, err) end
      until_us = refused_until(rule.release_time, state, charge.cost, charge.capacity)
      growth_us = next_growth_time(rule.release_time, state, charge.capacity)
      if not (until_us and growth_us) then raise_foreign_key(index - n + 1) end
    end
    if charge.is_counted then
      is_counted_full[policy] = is_counted_full[policy] or until_us ~= 0 and until_us ~= -1
    elseif until_us ~= 0 then
      is_refusing[policy] = true
      admitted = admitted and charge.is_shadow
      if until_us ~= -1 and not rule.is_block then is_full[policy] = true end
    end
    has_clock_stepped_back = has_clock_stepped_back or state.now - time > charge.per
    state.settles = charge.settles
    entries[#entries + 1] = { charge = charge, state = state, until_us = until_us, growth_us = growth_us }
  end

  -- Applies the decision to one counter. Returns whether the counter changed, and perhaps an error.
  local function apply_charge(entry)
    local charge, state = entry.charge, entry.state
    local rule, policy = charge.rule, charge.policy
    if charge.cost == 0 or charge.is_counted then return false end
    if rule.is_block then
      -- A block starts when a limit of its policy is full, and not only of reservations. An active
      -- block is not prolonged.
      local starts = entry.until_us == 0 and is_full[policy] and is_counted_full[policy] ~= false
      entry.is_charged = starts
      return starts, starts and rule.charge(state, 1)
    end
    if admitted and not (charge.is_shadow and is_refusing[policy]) then
      entry.is_charged = true
      return true, rule.charge(state, charge.cost)
    end
    if not (charge.counts_rejected and rule.charge_rejected and is_refusing[policy]
      and (admitted or not charge.is_shadow)) then return false end
    local err = rule.charge_rejected(state, charge.cost, charge.capacity)
    -- The rejected request itself now delays the next one.
    entry.until_us = err and 0 or refused_until(rule.release_time, state, charge.cost, charge.capacity)
    return true, err
  end

  local words, delay = {}, 0
  for index, entry in ipairs(entries) do
    local charge, state = entry.charge, entry.state
    local is_changed, err = apply_charge(entry)
    if err then error(err) end
    if is_changed then
      entry.growth_us = next_growth_time(charge.rule.release_time, state, charge.capacity)
      if state.delay and not charge.is_shadow then delay = max(delay, state.delay) end
    end
    if has_clock_stepped_back and charge.rule.is_block and not is_changed and not charge.is_unlimited then
      -- Alone, a block from a later time looks like one that began before a reload shortened it.
      state.now = state.ends_at - state.per
      entry.until_us = refused_until(charge.rule.release_time, state, charge.cost, charge.capacity)
      entry.growth_us = next_growth_time(charge.rule.release_time, state, charge.capacity)
    end
    local remaining = max(0, charge.capacity - state.used_units)
    -- section: overrides
    if charge.ends_at then
      entry.until_us, entry.growth_us =
        apply_override_end(KEYS[n + index - 1], charge, entry.until_us, entry.growth_us, remaining)
    end
    -- end section
    words[index] = format('%d %d %d', entry.until_us, remaining, entry.growth_us)
    -- section: overrides
    words[index] = (charge.override_words or '') .. words[index]
    -- end section
    if charge.settles then
      words[index] = words[index] .. ' ' .. integer(entry.is_charged and (state.charged_at or state.now) or 0)
    end
  end
  -- section: leases
  local policy
  for index, entry in ipairs(entries) do
    if entry.charge.requested_units and entry.charge.policy ~= policy then
      words[#words + 1] = format('%d %d', grant_lease(entries, index, admitted))
    end
    policy = entry.charge.policy
  end
  -- end section
  if delay > 0 then words[#words + 1] = integer(delay) end
  return table.concat(words, ' ')
end

local answers, n, count = {}, 1, #ARGV - 1
while n <= count do
  local text, last = ARGV[n + 1], n
  local charge = parsed_charges[text] or parse_charge(text)
  while last < count do
    local next_text = ARGV[last + 2]
    if not (parsed_charges[next_text] or parse_charge(next_text)).follows then break end
    last = last + 1
  end
  local ok, answer
  if charge.is_mergeable and last == n then
    ok, answer = pcall(decide_mergeable, n, charge)
  else
    ok, answer = pcall(decide_request, n, last)
  end
  if not ok then
    answer = type(answer) == 'table' and answer.err or answer
    if n == 1 and last == count then return { err = answer } end
    answer = '!' .. match(answer, '^[^\r\n]*')
  end
  answers[#answers + 1] = answer
  n = last + 1
end
if count == 0 then return integer(time) end
return integer(time) .. ' ' .. table.concat(answers, '\n')
