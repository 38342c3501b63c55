-- sliding_log: the rule of sliding_log.rs over one ZSET.
--
-- The score of an element is its time in us. Its member is one charge, in text, or a bundle of
-- older charges:
--   * `sum` or `sum:units` is a charge of 1 or of `units` units. `sum` is the running total of all
--     units ever charged to this log, modulo 2^53, this charge included.
--     Used units = newest sum - oldest counted sum + oldest counted units. Expired elements may
--     stay in the set, because nothing is counted and no separate total needs an update. The sum
--     makes members unique and is exact for any mix of costs. At most 2^53 units count at a time,
--     so the wrap-around is never ambiguous.
--   * `sum:units:kept`, only in the newest element: only the newest `kept` units count, however
--     young the others are. Those stay until they are trimmed. (They could make the wrap-around
--     ambiguous only for a limit of about 2^53 units.)
--   * `sum:units:kept:lead`, only in the newest element, with `kept` empty if all units count: the
--     element belongs to a lease. Its time is `lead` us ahead of the time that is proven to have
--     passed. Until then, charges are recorded at its time.
--   * Charges in the same microsecond share one element, so the order of scores is the order of
--     charges.
--   * Above LOG_SMALL elements, each LOG_BUNDLE charges become one element of 5 to 8 bytes per
--     charge instead of 100. It has the form `>IaIb`, then the sum after its last charge and the
--     units of all its charges (7 bytes each), then per charge: its age in us at the time of the
--     last charge, which is the score (`a` bytes), and the units of the bundle up to it (`b`
--     bytes), big-endian.
-- A decision reads two or three elements. A charge adds one and removes at most LOG_TRIM. Each is
-- O(log n).

-- section: plain check
-- A charge of one unit to a log, of which at most one element has expired. Its elements are of one
-- unit; the oldest may be a bundle.
local reply_N = try('ZRANGE', KEY, '-1', '-1', 'WITHSCORES')
local sum_N, newest_N, used_N, oldest_N, expired_N = tonumber(reply_N[1]), tonumber(reply_N[2]), 1, now, false
if sum_N then
  -- Every 32 units, older charges may have to be bundled.
  if newest_N >= now or sum_N % 1 ~= 0 or sum_N < 0 or sum_N > 9007199254740990 or sum_N % 32 == 31 then break end
  reply_N = call('ZRANGE', KEY, '0', '1', 'WITHSCORES')
  local first, window_start = tonumber(reply_N[1]), now - PER
  oldest_N, sum_N = tonumber(reply_N[2]), sum_N + 1
  if first and oldest_N <= window_start then
    first, oldest_N, expired_N = tonumber(reply_N[3]), tonumber(reply_N[4]), true
  end
  if first then
    if first % 1 ~= 0 or oldest_N <= window_start then break end
    used_N = sum_N - first + 1
  elseif expired_N or oldest_N <= window_start then
    break
  else
    local member, last = reply_N[1], oldest_N
    local kind, _, ages, _, totals = string.byte(member, 1, 5)
    if kind ~= 62 or #member < 20 or ages < 49 or ages > 56 or totals < 49 or totals > 56 then break end
    local width, before = ages + totals - 96, 0
    local low, high, layout = 1, (#member - 19) / width, string.sub(member, 1, 5)
    if high % 1 ~= 0 then break end
    -- The first charge that is later than the start of the window.
    while low < high do
      local middle = math.floor((low + high) / 2)
      local age, total = struct.unpack(layout, member, 20 + (middle - 1) * width)
      if last - age > window_start and total > 0 then
        high, oldest_N = middle, last - age
      else
        low, before = middle + 1, total
      end
    end
    local bundle_sum, units = struct.unpack('>I7I7', member, 6)
    used_N = sum_N - bundle_sum + units - before
  end
elseif reply_N.err or reply_N[1] then
  break
else
  sum_N = 1
end
if used_N < 1 or used_N > CAPACITY + 0 then break end
-- end section

-- section: plain charge
call('ZADD', KEY, format('%d', now), format('%d', sum_N))
if expired_N then call('ZREMRANGEBYRANK', KEY, '0', '0') end
call('PEXPIREAT', KEY, format('%d', math.ceil((now + PER) / 1000)))
local remaining_N, growth_N = CAPACITY - used_N, oldest_N + PER
-- end section

local LOG_WRAP = 9007199254740992
local LOG_TRIM = 64
local LOG_SMALL = 128
local LOG_BUNDLE = 64
-- Elements per ZADD or ZREM: the stack of Lua has room for some thousands of arguments.
local LOG_WRITE = 1000

-- Parses a member that is not one unit: a charge of more units, or a bundle.
local function log_parse_member(member, time)
  local kind, _, ages, _, totals = string.byte(member, 1, 5)
  if kind == 62 and #member > 19 then
    -- `ages` and `totals` are the digits `a` and `b`.
    local width = ages + totals - 96
    local count = (#member - 19) / width
    if ages < 49 or ages > 56 or totals < 49 or totals > 56 or count % 1 ~= 0 then return nil end
    local sum, units = struct.unpack('>I7I7', member, 6)
    if sum >= LOG_WRAP or units > LOG_WRAP then return nil end
    local format = string.sub(member, 1, 5)
    return { member = member, time = time, sum = sum, units = units, count = count, width = width, format = format }
  end
  local sum, units, kept, lead = match(member, '^(%d+):(%d+):?(%d*):?(%d*)$')
  sum, units = tonumber(sum), tonumber(units)
  if not sum or sum >= LOG_WRAP or units > LOG_WRAP then return nil end
  return { member = member, time = time, sum = sum, units = units, kept = tonumber(kept), lead = tonumber(lead) }
end

-- Parses the n-th value of a reply, a member, and the next, its score. Returns nil if they are
-- foreign. `time` and `sum` are those of the element's last charge, `units` are those of all its
-- charges. Only a bundle has a `count`.
local function log_parse_element(reply, n)
  local member, time = reply[n], tonumber(reply[n + 1])
  if not (time and time > 0 and time < LOG_WRAP and time % 1 == 0) then return nil end
  local sum = tonumber(member)
  if not sum then return log_parse_member(member, time) end
  if sum < 0 or sum >= LOG_WRAP or sum % 1 ~= 0 then return nil end
  return { member = member, time = time, sum = sum, units = 1 }
end

local function log_element_at(key, rank)
  rank = integer(rank)
  return log_parse_element(call('ZRANGE', key, rank, rank, 'WITHSCORES'), 1)
end

-- How many of the used units are up to the end of an element; 0 or less: none of this element.
local function log_units_up_to(log, element)
  return log.used_units - (log.newest.sum - element.sum) % LOG_WRAP
end

-- Finds the first charge of an element that is later than `time` and ends beyond the element's
-- first `units` units; the last charge if there is none. Returns its time and the units before it.
local function log_first_charge(element, time, units)
  local low, high, found, before = 1, element.count or 1, element.time, 0
  while low < high do
    local middle = math.floor((low + high) / 2)
    local age, total = struct.unpack(element.format, element.member, 20 + (middle - 1) * element.width)
    if element.time - age > time and total > units then
      high, found = middle, element.time - age
    else
      low, before = middle + 1, total
    end
  end
  return found, before
end

-- Finds the element with the `need`-th of the used units, 1 <= need <= used_units. Returns it and
-- how many of its units come before that one; nil if an element is foreign.
local function log_find_unit(log, need)
  local oldest, newest = log.oldest, log.newest
  local total = log_units_up_to(log, oldest)
  if need <= total then return oldest, oldest.units - (total - need) - 1 end
  if need > log.used_units - newest.units then return newest, newest.units - (log.used_units - need) - 1 end
  -- Searches by rank. Every element has at least one unit, which bounds the rank. If every element
  -- has exactly one unit, the first guess is right.
  local low = log.first ~= oldest and call('ZRANK', log.key, oldest.member) or 0
  local high = min(low + need - total, call('ZCARD', log.key) - 1)
  local guess = min(low + math.ceil((need - total) / oldest.units), high)
  while low <= high do
    local element = log_element_at(log.key, guess)
    if not element then return nil end
    total = log_units_up_to(log, element)
    if total < need then
      low = guess + 1
    elseif total - element.units >= need then
      high = guess - 1
    else
      return element, element.units - (total - need) - 1
    end
    guess = math.floor((low + high) / 2)
  end
end

-- Returns the state of a key at `time`, or at its newest charge if that is later. Returns nil and
-- perhaps an error if the value is foreign.
-- `first` is the first element, `oldest` the first that counts, and `oldest_time` the time of the
-- oldest used unit.
local function log_read(key, time, per)
  local reply = try('ZRANGE', key, '-1', '-1', 'WITHSCORES')
  if reply.err then return nil, reply end
  if not reply[1] then return { key = key, per = per, now = time, window_start = time - per, used_units = 0 } end
  local newest = log_parse_element(reply, 1)
  if not newest or newest.format then return nil end
  local now = max(time, newest.time - (newest.lead or 0))
  local window_start = now - per
  reply = call('ZRANGE', key, '0', '1', 'WITHSCORES')
  local first = log_parse_element(reply, 1)
  if not first then return nil end
  if first.time == newest.time then first = newest end
  if newest.time <= window_start then
    return {
      key = key, per = per, now = now, window_start = window_start, used_units = 0, newest = newest, first = first,
    }
  end
  local oldest = first
  if first.time <= window_start then
    -- Mostly only one charge has expired.
    oldest = log_parse_element(reply, 3)
    if oldest and oldest.time <= window_start then
      reply = call('ZRANGEBYSCORE', key, integer(window_start + 1), '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
      oldest = log_parse_element(reply, 1)
    end
    if not oldest then return nil end
    if oldest.time == newest.time then oldest = newest end
  end
  local oldest_time, expired_units = oldest.time, 0
  if oldest.format then oldest_time, expired_units = log_first_charge(oldest, window_start, 0) end
  -- In this order no number exceeds 2^53.
  local later_units, oldest_units = (newest.sum - oldest.sum) % LOG_WRAP, oldest.units - expired_units
  local log = {
    key = key, per = per, now = now, window_start = window_start, used_units = later_units + oldest_units,
    newest = newest, first = first, oldest = oldest, oldest_time = oldest_time,
  }
  if newest.kept and newest.kept - later_units < oldest_units then
    log.used_units, log.is_cut = newest.kept, true
    local element, before = log_find_unit(log, 1)
    if not element then return nil end
    log.oldest, log.oldest_time = element, log_first_charge(element, 0, before)
  end
  return log
end

-- When the oldest `need` of the used units, need <= used_units, have expired; nil if an element is
-- foreign.
local function log_release_time(log, need)
  if need == 1 then return log.oldest_time + log.per end
  if need == 0 then return (log.newest and log.newest.time or log.now) + log.per end
  local element, before = log_find_unit(log, need)
  return element and log_first_charge(element, 0, before) + log.per
end

local function log_format_member(sum, units, kept, lead)
  if lead > 0 then return format('%d:%d:%s:%d', sum, units, kept and integer(kept) or '', lead) end
  if kept then return format('%d:%d:%d', sum, units, kept) end
  if units == 1 then return integer(sum) end
  return format('%d:%d', sum, units)
end

-- Formats a bundle of the charges made at `times`. `totals[n]` are their units up to the n-th
-- charge; `sum` is the sum after the last one.
local function log_format_bundle(sum, times, totals)
  local last, bytes, parts = times[#times], {}, {}
  for n, number in ipairs({ last - times[1], totals[#totals] }) do
    bytes[n] = 1
    while number >= 256 do number, bytes[n] = number / 256, bytes[n] + 1 end
  end
  local format = '>I' .. bytes[1] .. 'I' .. bytes[2]
  for n = 1, #times do parts[n] = struct.pack(format, last - times[n], totals[n]) end
  return format .. struct.pack('>I7I7', sum, totals[#totals]) .. table.concat(parts)
end

-- Bundles the charges before the newest, once enough of them are elements of their own.
local function log_bundle_charges(log)
  if not log.oldest.format and call('ZCARD', log.key) <= LOG_SMALL then return end
  local from = integer(-1 - LOG_BUNDLE)
  local last = log_element_at(log.key, from)
  if not last or last.format then return end
  local reply = call('ZRANGE', log.key, from, '-2', 'WITHSCORES')
  local times, totals, total = {}, {}, 0
  for n = 1, LOG_BUNDLE do
    last = log_parse_element(reply, 2 * n - 1)
    if not last or last.format then return end
    total = total + last.units
    times[n], totals[n] = last.time, total
  end
  if total > LOG_WRAP then return end
  call('ZREMRANGEBYRANK', log.key, from, '-2')
  call('ZADD', log.key, integer(last.time), log_format_bundle(last.sum, times, totals))
end

-- Takes `cost` units, at least 1, at the time `charged_at` (nil: now). Afterwards only the newest
-- `max_units` count. Returns an error if Redis rejects the write; then nothing was written.
local function log_add_units(log, cost, max_units, charged_at)
  local key, now, last, first, oldest, oldest_time =
    log.key, log.now, log.newest, log.first, log.oldest, log.oldest_time
  local used_units, sum, units, kept = min(log.used_units + cost, max_units), cost, cost, nil
  local excess, replaces_last = cost - (used_units - log.used_units), false
  charged_at = charged_at or now
  if excess > 0 or log.is_cut then kept = used_units end
  if excess == log.used_units then
    oldest = nil
  elseif excess > 0 then
    local element, before = log_find_unit(log, excess + 1)
    -- The next read reports a foreign element: an error is not possible after a write.
    if element then oldest, oldest_time = element, log_first_charge(element, 0, before) end
  end
  if last then
    charged_at = max(charged_at, last.time)
    sum = (last.sum + (cost - LOG_WRAP)) % LOG_WRAP
    replaces_last = last.time == charged_at or last.units == 0
    if replaces_last then units = min(last.units + cost, LOG_WRAP) end
  else
    sum = sum % LOG_WRAP
  end
  log.charged_at = charged_at
  local lead = charged_at - now
  local member = log_format_member(sum, units, kept, lead)
  local reply = try('ZADD', key, integer(charged_at), member)
  if type(reply) == 'table' then return reply end
  local newest = { member = member, time = charged_at, sum = sum, units = units, lead = lead }
  if replaces_last then
    if last.member ~= member then call('ZREM', key, last.member) end
    if oldest == last then oldest = nil end
    if first == last then first = nil end
  end
  if not oldest then oldest, oldest_time = newest, charged_at end
  log.newest, log.oldest, log.oldest_time, log.used_units = newest, oldest, oldest_time, used_units
  if first and first ~= oldest then
    if (oldest.sum - first.sum) % LOG_WRAP + first.units - oldest.units <= LOG_TRIM then
      -- There are at most as many elements as units.
      call('ZREMRANGEBYSCORE', key, '-inf', '(' .. integer(oldest.time))
    else
      local count = min(LOG_TRIM, call('ZRANK', key, oldest.member))
      if count > 0 then call('ZREMRANGEBYRANK', key, '0', integer(count - 1)) end
    end
  end
  call('PEXPIREAT', key, integer(math.ceil((charged_at + log.per) / 1000)))
  -- A check on every charge would cost more than it saves.
  if last and math.floor(sum / 32) ~= math.floor(last.sum / 32) then log_bundle_charges(log) end
end

-- Takes `cost` units, at least 1.
local function log_charge(log, cost)
  return log_add_units(log, cost, LOG_WRAP)
end

rules.l = { is_additive = true, read = log_read, release_time = log_release_time, charge = log_charge }

-- section: rejected charges
-- Takes `cost` units of a rejected request. They replace the oldest units if they exceed the
-- capacity.
local function log_charge_rejected(log, cost, capacity)
  cost = min(cost, capacity)
  if cost > 0 then return log_add_units(log, cost, max(log.used_units, min(capacity, log.used_units + cost))) end
end

rules.l.charge_rejected = log_charge_rejected
-- end section

-- section: settlements
-- Lowers charges of an element by `returns`, pairs of units and time in order of time, from the
-- n-th on. `less` units of earlier charges are returned already. Returns the element's charges, how
-- many units are returned with it, and the next n.
local function log_lower_charges(log, element, returns, n, less)
  local times, totals, units_up_to = { element.time }, { element.units }, log_units_up_to(log, element)
  if element.format then
    for m = 1, element.count do
      local age, total = struct.unpack(element.format, element.member, 20 + (m - 1) * element.width)
      times[m], totals[m] = element.time - age, total
    end
  end
  local is_newest, kept_times, kept_totals, before, removed = element.member == log.newest.member, {}, {}, 0, less
  for m = 1, #times do
    local units, wanted = totals[m] - before, 0
    while returns[n] and returns[n][2] <= times[m] do
      if returns[n][2] == times[m] then wanted = wanted + returns[n][1] end
      n = n + 1
    end
    -- Units that do not count any more are not returned.
    local counted = units_up_to - (element.units - totals[m]) - less
    local returned = max(0, min(wanted, units, counted))
    before, less = totals[m], less + returned
    if returned < units or is_newest then
      kept_times[#kept_times + 1], kept_totals[#kept_totals + 1] = times[m], totals[m] - (less - removed)
    end
  end
  return kept_times, kept_totals, less, n
end

-- Returns up to `units` units of the charge made at each `time`, if it counts. `returns` are these
-- pairs, all of one log: the sums of all later elements change, once for all of them. The state
-- can't be used afterwards. Errors as log_add_units.
local function log_credit(log, returns)
  table.sort(returns, function(one, other) return one[2] < other[2] end)
  local n, less = 1, 0
  while returns[n] and returns[n][2] <= log.window_start do n = n + 1 end
  if not returns[n] or log.used_units == 0 then return end
  local reply = call('ZRANGEBYSCORE', log.key, integer(returns[n][2]), '+inf', 'WITHSCORES')
  local removed, added, is_added, obsolete = {}, {}, {}, {}
  for at = 1, #reply, 2 do
    local element = log_parse_element(reply, at)
    if not element then return end
    local before, times, totals = less, { element.time }, { element.units }
    if returns[n] and returns[n][2] <= element.time then
      times, totals, less, n = log_lower_charges(log, element, returns, n, less)
    end
    if less > 0 then
      local sum, last, member = (element.sum - less) % LOG_WRAP, #times, nil
      if element.format and less == before then
        member = element.format .. struct.pack('>I7I7', sum, element.units) .. string.sub(element.member, 20)
      elseif element.format and last > 0 then
        member = log_format_bundle(sum, times, totals)
      elseif last > 0 then
        local is_newest = at == #reply - 1
        member = log_format_member(sum, totals[1], is_newest and log.is_cut and log.used_units - less or nil,
          is_newest and element.lead or 0)
      end
      removed[#removed + 1] = element.member
      if member then
        added[#added + 1], added[#added + 2], is_added[member] = integer(times[last]), member, true
      end
    end
  end
  -- Adds before it removes: Redis deletes an empty key, and a migrating slot accepts no new key.
  for from = 1, #added, 2 * LOG_WRITE do
    local reply = try('ZADD', log.key, unpack(added, from, min(#added, from + 2 * LOG_WRITE - 1)))
    if type(reply) == 'table' then return reply end
  end
  for _, member in ipairs(removed) do
    if not is_added[member] then obsolete[#obsolete + 1] = member end
  end
  for from = 1, #obsolete, LOG_WRITE do
    call('ZREM', log.key, unpack(obsolete, from, min(#obsolete, from + LOG_WRITE - 1)))
  end
end

rules.l.credits_together, rules.l.credit = true, log_credit
-- end section

-- section: leases
local function log_grantable_until(log, last)
  return (not log.newest or log.newest.time <= last) and last
end

local function log_grant(log, units, last)
  return log_add_units(log, units, LOG_WRAP, last)
end

rules.l.grantable_until, rules.l.grant = log_grantable_until, log_grant
-- end section
