-- fixed_window: the rule of fixed_window.rs over one string, in one of two forms:
--
--   `number`      the start of the window (us) plus the used units. The key expires exactly with
--                 the window, so that INCRBY alone charges a unit: if the key exists, its window is
--                 the present one
--   `start:used`  where that is impossible: the sum could be that of another window, the window
--                 does not start with a millisecond, or ends in this or the next one

-- section: plain alone
-- Charges a window that has begun with one command, or begins one. No window of today starts before
-- 10^15 us, in 2001.
-- ARGV: capacity, period in us, then what differs from offset 0, cost 1 and, as in plain.lua, no time.
-- Reply: the value, if units remain; the window is known from it.
do
  local try, key, cost, now, offset = redis.pcall, KEYS[1], ARGV[4] or '1', ARGV[5] or '', ARGV[3] or 0
  local value = try('INCRBY', key, cost)
  if type(value) == 'number' then
    local used, is_new = (value - offset) % ARGV[2], value < 1000000000000000
    if now == '' then
      if used < ARGV[1] + 0 and not is_new and value <= 9007199254740992 then return value end
      now = try('TIME')
      now = (now[1] or 0) * 1000000 + (now[2] or 0)
    else
      now = now + 0
    end
    local capacity, per = ARGV[1] + 0, ARGV[2] + 0
    local start = now - (now - offset) % per
    if not is_new and (not ARGV[5] or start == value - used) then
      start = value - used
      if used <= capacity and value <= 9007199254740992 then
        -- The window may have ended since the key was read.
        now = math.min(math.max(now, start), start + per - 1)
        return string.format('%d 0 %d %d', now, capacity - used, start + per)
      end
    elseif value == cost + 0 and start >= 1000000000000000 and start + per - now > 2000 then
      local ends_ms = string.format('%d', (start + per) / 1000 - 1)
      if not try('SET', key, string.format('%d', start + cost), 'PXAT', ends_ms).err then
        return string.format('%d 0 %d %d', now, capacity - cost, start + per)
      end
    end
    -- Undoes the charge. An expiry in the past deletes a new key.
    if value == cost + 0 then try('PEXPIREAT', key, '1') else try('DECRBY', key, cost) end
  end
end
local ARGV = { ARGV[5] or '', ARGV[4] or '1', ARGV[1], ARGV[2], ARGV[3] or 0 }
-- end section

-- section: plain check
local value_N, per_N = try('GET', KEY), PER + 0
local start_N, used_N = now - (now - PARAMETER) % per_N, 0
if start_N < 1000000000000000 or start_N + per_N - now <= 2000 then break end
if value_N then
  value_N = tonumber(value_N)
  if not value_N or value_N < 1000000000000000 or value_N % 1 ~= 0 then break end
  used_N = (value_N - PARAMETER) % per_N
  if value_N - used_N > start_N then break end
  if value_N - used_N < start_N then used_N = 0 end
end
used_N = used_N + COST
if used_N > CAPACITY + 0 then break end
-- end section

-- section: plain charge
call('SET', KEY, format('%d', start_N + used_N), 'PXAT', format('%d', (start_N + per_N) / 1000 - 1))
local remaining_N, growth_N = CAPACITY - used_N, start_N + per_N
-- end section

-- Returns the state of a key at `time`, or at the start of its window if that is later. Returns nil
-- and perhaps an error if the value is foreign.
local function window_read(key, time, per, offset)
  local value = try('GET', key)
  local stored_start, used_units = 0, 0
  if value then
    if type(value) == 'table' then return nil, value end
    stored_start, used_units = match(value, '^(%d+):(%d+)$')
    stored_start, used_units = tonumber(stored_start), tonumber(used_units)
    if not stored_start then
      stored_start = tonumber(match(value, '^%d+$'))
      if not stored_start or stored_start < 1000000000000000 then return nil end
      used_units = (stored_start - offset) % per
      stored_start = stored_start - used_units
    end
    if stored_start > 9007199254740992 or used_units > 9007199254740992 then return nil end
  end
  local now = max(time, stored_start)
  local start = 0
  if now >= offset then start = now - (now - offset) % per end
  if start ~= stored_start then used_units = 0 end
  return { key = key, per = per, now = now, start = start, ends_at = start + per, used_units = used_units }
end

-- All used units are free again at the end of the window.
local function window_release_time(window)
  return window.ends_at
end

-- Stores the used units. Returns an error if Redis rejects the write; then nothing was written.
local function window_write(window, used_units)
  window.used_units = min(9007199254740992, used_units)
  local value, expires_ms = format('%d:%d', window.start, window.used_units), math.ceil(window.ends_at / 1000)
  local is_number = 2 * window.used_units < window.per and window.start >= 1000000000000000
    and window.start % 1000 == 0 and window.per % 1000 == 0 and window.ends_at - time > 2000
  -- section: calendars
  if window.is_calendar then is_number, value = false, value .. ':' .. integer(window.ends_at) end
  -- end section
  if is_number then
    -- Redis keeps a key through the whole millisecond of its expiry.
    value, expires_ms = integer(window.start + window.used_units), expires_ms - 1
  end
  local reply = try('SET', window.key, value, 'PXAT', integer(expires_ms))
  if reply.err then return reply end
end

-- Takes `cost` units, at least 1. Errors as window_write.
local function window_charge(window, cost)
  return window_write(window, window.used_units + cost)
end

rules.w = { is_additive = true, read = window_read, release_time = window_release_time, charge = window_charge }

-- section: rejected charges
-- Takes the available units, up to `cost`. Errors as window_write.
local function window_charge_rejected(window, cost, capacity)
  if window.used_units < capacity then return window_write(window, min(capacity, window.used_units + cost)) end
end

rules.w.charge_rejected = window_charge_rejected
-- end section

-- section: settlements
-- Returns `units` charged at `charged_at`, if that time is in this window. Errors as window_write.
local function window_credit(window, units, charged_at)
  if window.used_units == 0 or charged_at < window.start or charged_at >= window.ends_at then return end
  return window_write(window, max(0, window.used_units - units))
end

rules.w.credit = window_credit
-- end section

-- section: leases
-- A lease ends with the window at the latest.
-- Returns the end of a lease: `last`, or the end of the window if that is earlier.
local function window_grantable_until(window, last)
  return min(last, window.ends_at - 1)
end

rules.w.grantable_until, rules.w.grant = window_grantable_until, window_charge
-- end section

-- section: calendars
-- The rule `p` has the periods of a calendar as windows. Their boundaries come from the proxy. The
-- value `start:used:end` also contains the end, because instances may have different time zone data.

-- Boundaries by their text. Many charges of a batch have the same.
local parsed_boundaries = {}

-- The period that contains `now`, between two of the four boundaries. Returns nil if none does.
local function calendar_period(text, now)
  local boundaries = parsed_boundaries[text]
  if not boundaries then
    boundaries = { match(text, '^(%d+)%+(%d+)%+(%d+)%+(%d+)$') }
    for n = 1, #boundaries do boundaries[n] = tonumber(boundaries[n]) end
    parsed_boundaries[text] = boundaries
  end
  for n = 1, #boundaries - 1 do
    if now >= boundaries[n] and now < boundaries[n + 1] then return boundaries[n], boundaries[n + 1] end
  end
end

-- As window_read, for a period of a calendar. `boundaries` are the starts of the previous, the
-- current and the next period by the clock of the proxy, and the end of the next one. The error
-- `PERIOD` means that the clock of Redis is in none of them.
local function calendar_read(key, at, per, boundaries)
  local value = try('GET', key)
  local stored_start, used_units, stored_end = 0, 0, 0
  if value then
    if type(value) == 'table' then return nil, value end
    stored_start, used_units, stored_end = match(value, '^(%d+):(%d+):(%d+)$')
    stored_start, used_units, stored_end = tonumber(stored_start), tonumber(used_units), tonumber(stored_end)
    if not stored_start or used_units > 9007199254740992 or stored_end > 9007199254740992
      or stored_start >= stored_end then return nil end
  end
  local now = max(at, stored_start)
  local start, ends_at = stored_start, stored_end
  if now >= stored_end then
    start, ends_at = calendar_period(boundaries, now)
    if not start then
      -- Units of an outage that were used before all periods do not count any more.
      if at < time then return nil end
      return nil, { err = 'PERIOD the clocks of Redis and of the proxy are in different periods' }
    end
    start, used_units = max(start, stored_end), 0
  end
  return { key = key, per = per, now = now, start = start, ends_at = ends_at, used_units = used_units,
    is_calendar = true }
end

rules.p = {}
for name, value in pairs(rules.w) do rules.p[name] = value end
rules.p.read = calendar_read
-- end section
