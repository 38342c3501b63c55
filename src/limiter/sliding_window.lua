-- sliding_window: the rule of sliding_window.rs over one string, `first:u,u,…`.
--
-- `first` is the number of the oldest sub-window kept, its start divided by the width; the units of it and of each
-- that follows stand behind, up to the newest that was charged.

-- The state of a key at `time`, or at the start of its newest sub-window if that is later; nil and perhaps an error
-- if it isn't ours.
local function buckets_read(key, time, per, width)
  local state = { key = key, per = per, width = width, now = time, used = 0, first = 0, from = 1, units = {} }
  local value = redis.pcall('GET', key)
  if not value then return state end
  if type(value) == 'table' then return nil, value end
  local first, list = string.match(value, '^(%d+):([%d,]+)$')
  first = tonumber(first)
  if not first then return nil end
  local units, count = state.units, 0
  for number in string.gmatch(list, '%d+') do
    count = count + 1
    units[count] = tonumber(number)
  end
  if (first + count) * width > 9007199254740992 then return nil end
  state.first, state.now = first, math.max(time, (first + count - 1) * width)
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

-- Takes `cost` units, at least 1; an error if Redis doesn't let us write, and then nothing was written.
local function buckets_charge(state, cost)
  local this = math.floor(state.now / state.width)
  local kept = {}
  for n = state.from, #state.units do kept[#kept + 1] = state.units[n] end
  local first = #kept > 0 and state.first + state.from - 1 or this
  for n = #kept + 1, this - first + 1 do kept[n] = 0 end
  kept[#kept] = kept[#kept] + cost
  local texts = {}
  for n = 1, #kept do texts[n] = string.format('%.0f', kept[n]) end
  local value = string.format('%.0f:', first) .. table.concat(texts, ',')
  local expires = math.ceil(((this + 1) * state.width - 1 + state.per) / 1000)
  local reply = redis.pcall('SET', state.key, value, 'PXAT', expires)
  if reply.err then return reply end
  state.first, state.from, state.units, state.used = first, 1, kept, state.used + cost
end

rules.s = { read = buckets_read, frees = buckets_frees, charge = buckets_charge }
