-- sliding_window: the rule of sliding_window.rs over one string, `first:u,u,…` or `first:u,u,…;lead`.
--
-- `first` is the number of the oldest sub-window kept, its start divided by the width; the units of it and of each
-- that follows stand behind, up to the newest that was charged. `lead` is how many sub-windows that one stands ahead of
-- the newest that is proven to have begun: it was lent. What is charged until it has begun stands with it.

-- The state of a key at `time`, or at the start of its newest sub-window if that is later; nil and perhaps an error
-- if it isn't ours.
local function buckets_read(key, time, per, width)
  local state = { key = key, per = per, width = width, now = time, used = 0, first = 0, from = 1, units = {}, lead = 0 }
  local value = try('GET', key)
  if not value then return state end
  if type(value) == 'table' then return nil, value end
  local first, list, lead = match(value, '^(%d+):([%d,]+);?(%d*)$')
  first, lead = tonumber(first), tonumber(lead) or 0
  if not first then return nil end
  local units, count = state.units, 0
  for number in string.gmatch(list, '%d+') do
    count = count + 1
    units[count] = tonumber(number)
  end
  if (first + count) * width > 9007199254740992 then return nil end
  state.first, state.lead, state.now = first, lead, max(time, (first + count - 1 - lead) * width)
  -- Whole sub-windows leave.
  local from = 1
  while from <= count and (first + from) * width - 1 + per <= state.now do from = from + 1 end
  for n = from, count do state.used = state.used + units[n] end
  state.from = from
  return state
end

-- When the oldest `need` of the units in use, 1 <= need <= used, have left.
local function buckets_frees(state, need)
  local n = state.from
  while need > state.units[n] do
    need = need - state.units[n]
    n = n + 1
  end
  return (state.first + n) * state.width - 1 + state.per
end

-- Writes what was read; an error if Redis doesn't let us, and then nothing was written.
local function buckets_write(state)
  local texts = {}
  for n, units in ipairs(state.units) do texts[n] = format('%.0f', units) end
  local value = format('%.0f:', state.first) .. table.concat(texts, ',')
  if state.lead > 0 then value = value .. ';' .. integer(state.lead) end
  local expires = math.ceil(((state.first + #texts) * state.width - 1 + state.per) / 1000)
  local reply = try('SET', state.key, value, 'PXAT', expires)
  if reply.err then return reply end
end

-- Takes `cost` units, at least 1, in the sub-window of a time, of now if there is none; of these and all before, the
-- newest `most` count on. Errors as above.
local function buckets_take(state, cost, most, stands)
  local now = math.floor(state.now / state.width)
  local newest = #state.units > 0 and state.first + #state.units - 1 or 0
  local this = max(math.floor((stands or state.now) / state.width), newest)
  state.lead = this - now
  local units = {}
  for n = state.from, #state.units do units[#units + 1] = state.units[n] end
  state.first, state.from, state.units = #units > 0 and state.first + state.from - 1 or this, 1, units
  for n = #units + 1, this - state.first + 1 do units[n] = 0 end
  -- No number passes 2^53: what is pushed out goes first, and it is never more than was in use.
  local used = min(state.used + cost, most)
  local pushed, n = cost - (used - state.used), 1
  while pushed > 0 do
    local gone = min(pushed, units[n])
    units[n], pushed, n = units[n] - gone, pushed - gone, n + 1
  end
  units[#units] = units[#units] + cost
  state.used = used
  state.stands = max(state.now, this * state.width)
  return buckets_write(state)
end

-- Takes `cost` units, at least 1.
local function buckets_charge(state, cost)
  return buckets_take(state, cost, 9007199254740992)
end

rules.s = { adds = true, read = buckets_read, frees = buckets_frees, charge = buckets_charge }

-- only for counting
-- Takes `cost` units of one who was refused, in place of the oldest where they don't fit.
local function buckets_press(state, cost, capacity)
  cost = min(cost, capacity)
  if cost > 0 then return buckets_take(state, cost, max(state.used, min(capacity, state.used + cost))) end
end

rules.s.press = buckets_press
-- end

-- only for amending
-- Takes up to `units` units off the sub-window of `at`, if it still counts.
local function buckets_credit(state, units, at)
  local n = math.floor(at / state.width) - state.first + 1
  if n < state.from or n > #state.units then return end
  units = min(units, state.units[n])
  state.units[n], state.used = state.units[n] - units, state.used - units
  return buckets_write(state)
end

rules.s.credit = buckets_credit
-- end

-- only for lending
local function buckets_lends(state, last)
  return state.first + #state.units - 1 <= math.floor(last / state.width) and last
end

local function buckets_lend(state, units, last)
  return buckets_take(state, units, 9007199254740992, last)
end

rules.s.lends, rules.s.lend = buckets_lends, buckets_lend
-- end
