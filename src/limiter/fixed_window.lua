-- fixed_window: the rule of fixed_window.rs over one string, `start:used`.
--
-- The window's start stands in the value, because expiry can't draw the edge: Redis keeps a key through the
-- whole millisecond of its deadline.

-- The state of a key at `time`, or at the start of its window if that is later; nil and perhaps an error if it
-- isn't ours.
local function window_read(key, time, per, offset)
  local value = try('GET', key)
  local was, used = 0, 0
  if value then
    if type(value) == 'table' then return nil, value end
    was, used = match(value, '^(%d+):(%d+)$')
    was, used = tonumber(was), tonumber(used)
    if not was or was > 9007199254740992 or used > 9007199254740992 then return nil end
  end
  local now = max(time, was)
  local start = 0
  if now >= offset then start = now - (now - offset) % per end
  if start ~= was then used = 0 end
  return { key = key, now = now, start = start, ends = start + per, used = used }
end

-- When used units come back: all at once.
local function window_frees(window)
  return window.ends
end

-- Makes so many used; an error if Redis doesn't let us write, and then nothing was written.
local function window_use(window, used)
  window.used = min(9007199254740992, used)
  local value = format('%d:%d', window.start, window.used)
  local reply = try('SET', window.key, value, 'PXAT', integer(math.ceil(window.ends / 1000)))
  if reply.err then return reply end
end

-- Takes `cost` units, at least 1; an error as window_use.
local function window_charge(window, cost)
  return window_use(window, window.used + cost)
end

rules.w = { adds = true, read = window_read, frees = window_frees, charge = window_charge }

-- only for counting
-- Takes what there is, up to `cost`; an error as window_use.
local function window_press(window, cost, capacity)
  if window.used < capacity then return window_use(window, min(capacity, window.used + cost)) end
end

rules.w.press = window_press
-- end

-- only for amending
-- Gives back `units` charged at `at`, if that was in this window; an error as window_use.
local function window_credit(window, units, at)
  if window.used == 0 or at < window.start or at >= window.ends then return end
  return window_use(window, max(0, window.used - units))
end

rules.w.credit = window_credit
-- end

-- only for lending
-- What is lent dies at the edge.
local function window_lends(window, last)
  return min(last, window.ends - 1)
end

rules.w.lends, rules.w.lend = window_lends, window_charge
-- end
