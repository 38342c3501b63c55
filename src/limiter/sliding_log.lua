-- sliding_log: the rule of sliding_log.rs over one ZSET.
--
-- An element's score is its time in us. Its member is one charge, in text, or a bundle of older ones.
--   * A charge is `sum`, or `sum:units` if it carries other than one unit, where `sum` is the running total of all
--     units ever charged to this log, modulo 2^53, the charge included. Units in use = newest sum - oldest living sum
--     + oldest living units. No counting, no sum kept beside that a trim would have to mend, so what has left may
--     stay in the set for a while and changes nothing. The sum makes members unique, and is exact at any mix of
--     costs. As at most 2^53 units live at once, the wrap is never ambiguous.
--   * `sum:units:kept` in the newest element: only the newest `kept` units count, however young the others are, which
--     stay until they are trimmed. (Only a limit of about 2^53 units could be deceived by them as to the wrap.)
--   * `sum:units:kept:lead` in the newest element, `kept` empty if all count: it was lent and stands so far (us) ahead
--     of the time that is proven to have passed. What is charged until that time has come stands with it.
--   * Charges in the same microsecond share one entry, so the order of scores is the order of charges.
--   * Above LOG_SMALL elements, LOG_BUNDLE charges at a time become one: `>IaIb`, the sum at its end and all of its
--     units (7 bytes each), and per charge its age in us at the time of the last (the score; `a` bytes) and the
--     bundle's units up to it (`b` bytes), big-endian. That is 5 to 8 bytes per charge, not 100.
-- A check reads two or three elements, a charge adds one and drops at most LOG_TRIM: O(log n) each.

local LOG_WRAP = 9007199254740992
local LOG_TRIM = 64
local LOG_SMALL = 128
local LOG_BUNDLE = 64
local LOG_AMEND = 250

-- What an element says that is no single unit: a charge of more, or a bundle.
local function log_other(member, at)
  local kind, _, ages, _, totals = string.byte(member, 1, 5)
  if kind == 62 and #member > 19 then
    -- The digits of `a` and `b`.
    local width = ages + totals - 96
    local count = (#member - 19) / width
    if ages < 49 or ages > 56 or totals < 49 or totals > 56 or count % 1 ~= 0 then return nil end
    local sum, units = struct.unpack('>I7I7', member, 6)
    if sum >= LOG_WRAP or units > LOG_WRAP then return nil end
    local format = string.sub(member, 1, 5)
    return { member = member, at = at, sum = sum, units = units, count = count, width = width, format = format }
  end
  local sum, units, kept, lead = match(member, '^(%d+):(%d+):?(%d*):?(%d*)$')
  sum, units = tonumber(sum), tonumber(units)
  if not sum or sum >= LOG_WRAP or units > LOG_WRAP then return nil end
  return { member = member, at = at, sum = sum, units = units, kept = tonumber(kept), lead = tonumber(lead) }
end

-- What the n-th value and the next of a reply, a member and its score, say, or nil if they were not written by us:
-- the time and the sum of the last charge in it, and the units of all. `count` is a bundle's alone.
local function log_element(reply, n)
  local member, at = reply[n], tonumber(reply[n + 1])
  if not (at and at > 0 and at < LOG_WRAP and at % 1 == 0) then return nil end
  local sum = tonumber(member)
  if not sum then return log_other(member, at) end
  if sum < 0 or sum >= LOG_WRAP or sum % 1 ~= 0 then return nil end
  return { member = member, at = at, sum = sum, units = 1 }
end

local function log_at(key, rank)
  rank = integer(rank)
  return log_element(call('ZRANGE', key, rank, rank, 'WITHSCORES'), 1)
end

-- How many of the units in use stand up to the end of an element; 0 or less: none of its own.
local function log_upto(log, element)
  return log.used - (log.newest.sum - element.sum) % LOG_WRAP
end

-- The time of an element's first charge that is later than `time` and ends beyond its first `units` units, if need be
-- the last, and the element's units before it.
local function log_first(element, time, units)
  local low, high, found, before = 1, element.count or 1, element.at, 0
  while low < high do
    local middle = math.floor((low + high) / 2)
    local age, upto = struct.unpack(element.format, element.member, 20 + (middle - 1) * element.width)
    if element.at - age > time and upto > units then
      high, found = middle, element.at - age
    else
      low, before = middle + 1, upto
    end
  end
  return found, before
end

-- The element with the `need`-th of the units in use, 1 <= need <= used, and how many of its units stand before that;
-- nil if an element isn't ours.
local function log_seek(log, need)
  local oldest, newest = log.oldest, log.newest
  local upto = log_upto(log, oldest)
  if need <= upto then return oldest, oldest.units - (upto - need) - 1 end
  if need > log.used - newest.units then return newest, newest.units - (log.used - need) - 1 end
  -- A search by rank: an element has at least one unit. In a log of single units the first guess ends it.
  local low = log.first ~= oldest and call('ZRANK', log.key, oldest.member) or 0
  local high = min(low + need - upto, call('ZCARD', log.key) - 1)
  local guess = min(low + math.ceil((need - upto) / oldest.units), high)
  while low <= high do
    local element = log_at(log.key, guess)
    if not element then return nil end
    upto = log_upto(log, element)
    if upto < need then
      low = guess + 1
    elseif upto - element.units >= need then
      high = guess - 1
    else
      return element, element.units - (upto - need) - 1
    end
    guess = math.floor((low + high) / 2)
  end
end

-- The state of a key at `time`, or at its newest charge if that is later; nil and perhaps an error if it isn't ours.
-- `first` is the first element, `oldest` the first that counts, and `at` the time of the oldest unit in use.
local function log_read(key, time, per)
  local reply = try('ZRANGE', key, '-1', '-1', 'WITHSCORES')
  if reply.err then return nil, reply end
  if not reply[1] then return { key = key, per = per, now = time, left = time - per, used = 0 } end
  local newest = log_element(reply, 1)
  if not newest or newest.format then return nil end
  local now = max(time, newest.at - (newest.lead or 0))
  local left = now - per
  reply = call('ZRANGE', key, '0', '1', 'WITHSCORES')
  local first = log_element(reply, 1)
  if not first then return nil end
  if first.at == newest.at then first = newest end
  if newest.at <= left then
    return { key = key, per = per, now = now, left = left, used = 0, newest = newest, first = first }
  end
  local oldest = first
  if first.at <= left then
    -- Mostly charges leave one by one.
    oldest = log_element(reply, 3)
    if oldest and oldest.at <= left then
      reply = call('ZRANGEBYSCORE', key, integer(left + 1), '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
      oldest = log_element(reply, 1)
    end
    if not oldest then return nil end
    if oldest.at == newest.at then oldest = newest end
  end
  local at, gone = oldest.at, 0
  if oldest.format then at, gone = log_first(oldest, left, 0) end
  -- In this order no number passes 2^53.
  local behind, living = (newest.sum - oldest.sum) % LOG_WRAP, oldest.units - gone
  local log = {
    key = key, per = per, now = now, left = left, used = behind + living,
    newest = newest, first = first, oldest = oldest, at = at,
  }
  if newest.kept and newest.kept - behind < living then
    log.used, log.cut = newest.kept, true
    local element, before = log_seek(log, 1)
    if not element then return nil end
    log.oldest, log.at = element, log_first(element, 0, before)
  end
  return log
end

-- When the oldest `need` of the units in use, 1 <= need <= used, have left; nil if an element isn't ours.
local function log_frees(log, need)
  if need == 1 then return log.at + log.per end
  local element, before = log_seek(log, need)
  return element and log_first(element, 0, before) + log.per
end

local function log_member(sum, units, kept, lead)
  if lead > 0 then return format('%d:%d:%s:%d', sum, units, kept and integer(kept) or '', lead) end
  if kept then return format('%d:%d:%d', sum, units, kept) end
  if units == 1 then return integer(sum) end
  return format('%d:%d', sum, units)
end

-- The charges made at `times`; `upto[n]` of their units are those up to the n-th, and `sum` is the sum after the last.
local function log_bundle(sum, times, upto)
  local last, bytes, parts = times[#times], {}, {}
  for n, number in ipairs({ last - times[1], upto[#upto] }) do
    bytes[n] = 1
    while number >= 256 do number, bytes[n] = number / 256, bytes[n] + 1 end
  end
  local format = '>I' .. bytes[1] .. 'I' .. bytes[2]
  for n = 1, #times do parts[n] = struct.pack(format, last - times[n], upto[n]) end
  return format .. struct.pack('>I7I7', sum, upto[#upto]) .. table.concat(parts)
end

-- Bundles the charges next to the newest, once enough of them stand alone.
local function log_pack(log)
  if not log.oldest.format and call('ZCARD', log.key) <= LOG_SMALL then return end
  local from = integer(-1 - LOG_BUNDLE)
  local last = log_at(log.key, from)
  if not last or last.format then return end
  local reply = call('ZRANGE', log.key, from, '-2', 'WITHSCORES')
  local times, upto, total = {}, {}, 0
  for n = 1, LOG_BUNDLE do
    last = log_element(reply, 2 * n - 1)
    if not last or last.format then return end
    total = total + last.units
    times[n], upto[n] = last.at, total
  end
  if total > LOG_WRAP then return end
  call('ZREMRANGEBYRANK', log.key, from, '-2')
  call('ZADD', log.key, integer(last.at), log_bundle(last.sum, times, upto))
end

-- Takes `cost` units, at least 1, that stand at a time, now if there is none; of these and all before, the newest `most`
-- count on. An error if Redis doesn't let us write, and then nothing was written.
local function log_take(log, cost, most, stands)
  local key, now, last, first, oldest, at = log.key, log.now, log.newest, log.first, log.oldest, log.at
  local used, sum, units, kept = min(log.used + cost, most), cost, cost, nil
  local pushed, replaced = cost - (used - log.used), false
  stands = stands or now
  if pushed > 0 or log.cut then kept = used end
  if pushed == log.used then
    oldest = nil
  elseif pushed > 0 then
    local element, before = log_seek(log, pushed + 1)
    -- What isn't ours is found at the next look: reading is over.
    if element then oldest, at = element, log_first(element, 0, before) end
  end
  if last then
    stands = max(stands, last.at)
    sum = (last.sum + (cost - LOG_WRAP)) % LOG_WRAP
    replaced = last.at == stands or last.units == 0
    if replaced then units = min(last.units + cost, LOG_WRAP) end
  else
    sum = sum % LOG_WRAP
  end
  log.stands = stands
  local lead = stands - now
  local member = log_member(sum, units, kept, lead)
  local reply = try('ZADD', key, integer(stands), member)
  if type(reply) == 'table' then return reply end
  local newest = { member = member, at = stands, sum = sum, units = units, lead = lead }
  if replaced then
    if last.member ~= member then call('ZREM', key, last.member) end
    if oldest == last then oldest = nil end
    if first == last then first = nil end
  end
  if not oldest then oldest, at = newest, stands end
  log.newest, log.oldest, log.at, log.used = newest, oldest, at, used
  if first and first ~= oldest then
    if (oldest.sum - first.sum) % LOG_WRAP + first.units - oldest.units <= LOG_TRIM then
      -- No fewer units than elements.
      call('ZREMRANGEBYSCORE', key, '-inf', '(' .. integer(oldest.at))
    else
      local count = min(LOG_TRIM, call('ZRANK', key, oldest.member))
      if count > 0 then call('ZREMRANGEBYRANK', key, '0', integer(count - 1)) end
    end
  end
  call('PEXPIREAT', key, integer(math.ceil((stands + log.per) / 1000)))
  -- To look at each charge would cost more.
  if last and math.floor(sum / 32) ~= math.floor(last.sum / 32) then log_pack(log) end
end

-- Takes `cost` units, at least 1.
local function log_charge(log, cost)
  return log_take(log, cost, LOG_WRAP)
end

rules.l = { adds = true, read = log_read, frees = log_frees, charge = log_charge }

-- only for counting
-- Takes `cost` units of one who was refused, in place of the oldest where they don't fit.
local function log_press(log, cost, capacity)
  cost = min(cost, capacity)
  if cost > 0 then return log_take(log, cost, max(log.used, min(capacity, log.used + cost))) end
end

rules.l.press = log_press
-- end

-- only for amending
-- Takes up to `units` units off the charge made at `at`, if it counts and no more than LOG_AMEND came after it: their
-- sums change. The state isn't to be used any more. Errors as above.
local function log_credit(log, units, at)
  local element, rank, later, behind, counted = log.newest, -1, {}, 0, log.used
  if counted == 0 or at <= log.left or at > element.at then return end
  while true do
    local before = log_at(log.key, rank - 1)
    if not before or before.at < at then break end
    later[#later + 1] = element
    behind, counted = behind + (element.count or 1), counted - element.units
    if behind > LOG_AMEND or counted <= 0 then return end
    element, rank = before, rank - 1
  end
  local times, upto, found = { element.at }, { element.units }, nil
  local count = element.count or 1
  for n = 1, count do
    if element.format then
      local age, total = struct.unpack(element.format, element.member, 20 + (n - 1) * element.width)
      times[n], upto[n] = element.at - age, total
    end
    if times[n] == at then found = n end
  end
  if not found or behind + count - found > LOG_AMEND then return end
  local before = upto[found - 1] or 0
  units = min(units, upto[found] - before, counted - (element.units - upto[found]))
  if units <= 0 then return end
  local empty = upto[found] - before == units and rank < -1
  for n = found, #upto do upto[n] = upto[n] - units end
  if empty then
    table.remove(times, found)
    table.remove(upto, found)
  end
  local removed, added = { element.member }, {}
  local function add(time, member)
    added[#added + 1] = integer(time)
    added[#added + 1] = member
  end
  local kept = log.cut and log.used - units or nil
  local sum = (element.sum - units) % LOG_WRAP
  if #times > 0 then
    local is_newest = rank == -1
    local single = not element.format
      and log_member(sum, upto[1], is_newest and kept or nil, is_newest and element.lead or 0)
    add(times[#times], single or log_bundle(sum, times, upto))
  end
  for n, one in ipairs(later) do
    sum = (one.sum - units) % LOG_WRAP
    removed[#removed + 1] = one.member
    if one.format then
      add(one.at, one.format .. struct.pack('>I7I7', sum, one.units) .. string.sub(one.member, 20))
    else
      add(one.at, log_member(sum, one.units, n == 1 and kept or nil, n == 1 and one.lead or 0))
    end
  end
  local reply = try('ZREM', log.key, unpack(removed))
  if type(reply) == 'table' and reply.err then return reply end
  call('ZADD', log.key, unpack(added))
  call('PEXPIREAT', log.key, integer(math.ceil((log.newest.at + log.per) / 1000)))
end

rules.l.credit = log_credit
-- end

-- only for lending
local function log_lends(log, last)
  return (not log.newest or log.newest.at <= last) and last
end

local function log_lend(log, units, last)
  return log_take(log, units, LOG_WRAP, last)
end

rules.l.lends, rules.l.lend = log_lends, log_lend
-- end
