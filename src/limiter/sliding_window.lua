-- sliding_window: the rule of sliding_window.rs over one string, `first:u,u,...` or
-- `first:u,u,...;lead`.
--
-- `first` is the number of the oldest stored sub-window: its start divided by the width. The units
-- of this and of each later sub-window follow, up to the newest charged one. `lead` is set if the
-- newest one belongs to a lease: by so many sub-windows it is ahead of the newest sub-window that
-- is proven to have begun. Until it has begun, charges are recorded in it.

-- section: plain check
-- A charge to the present sub-window, unless a lease is ahead of it.
local value_N, per_N, width_N = try('GET', KEY), PER + 0, PARAMETER + 0
local present_N, next_N, list_N = math.floor(now / width_N), nil, ''
if not value_N then
  next_N = present_N
elseif type(value_N) == 'string' then
  next_N, list_N = string.match(value_N, '^(%d+):([%d,]+)$')
end
if not next_N then break end
local used_N, kept_N, count_N, oldest_N = 0, {}, 0, present_N
next_N = next_N + 0
for units in string.gmatch(list_N, '%d+') do
  if count_N > 0 or (next_N + 1) * width_N - 1 + per_N > now then
    count_N = count_N + 1
    kept_N[count_N] = units
    used_N = used_N + units
    if oldest_N == present_N and units ~= '0' then oldest_N = next_N end
  end
  next_N = next_N + 1
end
if next_N > present_N + 1 or used_N > CAPACITY - COST then break end
-- end section

-- section: plain charge
local first_N = count_N > 0 and next_N - count_N or present_N
for n = count_N + 1, present_N - first_N do kept_N[n] = '0' end
count_N = present_N - first_N + 1
kept_N[count_N] = kept_N[count_N] and format('%d', kept_N[count_N] + COST) or COST
call('SET', KEY, format('%d:', first_N) .. table.concat(kept_N, ','), 'PXAT',
  format('%d', math.ceil(((present_N + 1) * width_N - 1 + per_N) / 1000)))
local remaining_N, growth_N = CAPACITY - COST - used_N, (oldest_N + 1) * width_N - 1 + per_N
-- end section

-- Returns the state of a key at `time`, or at the start of its newest sub-window if that is later.
-- Returns nil if the value does not have this format, and also Redis' error if the key has another
-- type.
local function sub_windows_read(key, time, per, width)
  local state = {
    key = key, per = per, width = width, now = time, used_units = 0, first = 0, first_counted = 1, units = {}, lead = 0,
  }
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
  -- A sub-window counts until its last instant has left the window.
  local first_counted = 1
  while first_counted <= count and (first + first_counted) * width - 1 + per <= state.now do
    first_counted = first_counted + 1
  end
  for n = first_counted, count do state.used_units = state.used_units + units[n] end
  state.first_counted = first_counted
  return state
end

-- When the oldest `need` of the used units, need <= used_units, have expired.
local function sub_windows_release_time(state, need)
  local n = need > 0 and state.first_counted or #state.units
  while need > (state.units[n] or 0) do
    need = need - state.units[n]
    n = n + 1
  end
  return (state.first + n) * state.width - 1 + state.per
end

-- Stores the state. Returns an error if Redis rejects the write; then nothing was written.
local function sub_windows_write(state)
  local texts = {}
  for n, units in ipairs(state.units) do texts[n] = format('%.0f', units) end
  local value = format('%.0f:', state.first) .. table.concat(texts, ',')
  if state.lead > 0 then value = value .. ';' .. integer(state.lead) end
  local reply = try('SET', state.key, value, 'PXAT', integer(math.ceil(sub_windows_release_time(state, 0) / 1000)))
  if reply.err then return reply end
end

-- Takes `cost` units, at least 1, in the sub-window of `charged_at` (nil: now). Afterwards only the
-- newest `max_units` count. Errors as sub_windows_write.
local function sub_windows_add_units(state, cost, max_units, charged_at)
  local current = math.floor(state.now / state.width)
  local newest = #state.units > 0 and state.first + #state.units - 1 or 0
  local target = max(math.floor((charged_at or state.now) / state.width), newest)
  state.lead = target - current
  local units = {}
  for n = state.first_counted, #state.units do units[#units + 1] = state.units[n] end
  state.first, state.first_counted, state.units =
    #units > 0 and state.first + state.first_counted - 1 or target, 1, units
  for n = #units + 1, target - state.first + 1 do units[n] = 0 end
  -- Removes the oldest units before adding, so that no number exceeds 2^53.
  local used_units = min(state.used_units + cost, max_units)
  local excess, n = cost - (used_units - state.used_units), 1
  while excess > 0 do
    local removed = min(excess, units[n])
    units[n], excess, n = units[n] - removed, excess - removed, n + 1
  end
  units[#units] = units[#units] + cost
  state.used_units = used_units
  state.charged_at = max(state.now, target * state.width)
  return sub_windows_write(state)
end

-- Takes `cost` units, at least 1.
local function sub_windows_charge(state, cost)
  return sub_windows_add_units(state, cost, 9007199254740992)
end

rules.s = {
  is_additive = true, read = sub_windows_read, release_time = sub_windows_release_time, charge = sub_windows_charge,
}

-- section: rejected charges
-- Takes `cost` units of a rejected request. They replace the oldest units if they exceed the
-- capacity.
local function sub_windows_charge_rejected(state, cost, capacity)
  cost = min(cost, capacity)
  if cost > 0 then
    return sub_windows_add_units(state, cost, max(state.used_units, min(capacity, state.used_units + cost)))
  end
end

rules.s.charge_rejected = sub_windows_charge_rejected
-- end section

-- section: settlements
-- Returns up to `units` units of the sub-window of `charged_at`, if it still counts.
local function sub_windows_credit(state, units, charged_at)
  local n = math.floor(charged_at / state.width) - state.first + 1
  if n < state.first_counted or n > #state.units then return end
  units = min(units, state.units[n])
  state.units[n], state.used_units = state.units[n] - units, state.used_units - units
  return sub_windows_write(state)
end

rules.s.credit = sub_windows_credit
-- end section

-- section: leases
local function sub_windows_grantable_until(state, last)
  return state.first + #state.units - 1 <= math.floor(last / state.width) and last
end

local function sub_windows_grant(state, units, last)
  return sub_windows_add_units(state, units, 9007199254740992, last)
end

rules.s.grantable_until, rules.s.grant = sub_windows_grantable_until, sub_windows_grant
-- end section
