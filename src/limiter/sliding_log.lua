-- sliding_log: the rule of sliding_log.rs over one ZSET.
--
-- An entry's score is its time in us. Its member is `sum`, or `sum:units` if it carries other than one unit,
-- where `sum` is the running total of all units ever charged to this log, modulo 2^53, the entry included.
--   * Units in use = newest sum - oldest living sum + oldest living units. No counting, no sum kept beside that
--     a trim would have to mend, so what has left may stay in the set for a while and changes nothing.
--   * The sum makes members unique. It is exact at any mix of costs, also when a reload changes the cost, and
--     a log of single units pays nothing for it. As at most 2^53 units live at once, the wrap is never ambiguous.
--   * Charges in the same microsecond share one entry, so the order of scores is the order of charges.
-- A check reads two entries, a charge adds one and drops at most LOG_TRIM that have left: O(log n) each.
-- Memory: about 20 bytes per charge up to 128 of them, about 110 above.

local LOG_WRAP = 9007199254740992
local LOG_TRIM = 64

-- What a reply of one member and its score says, or nil if it was not written by us.
local function log_entry(reply)
  local member, at = reply[1], tonumber(reply[2])
  local sum, units = tonumber(member), 1
  if not sum then
    sum, units = string.match(member or '', '^(%d+):(%d+)$')
    sum, units = tonumber(sum), tonumber(units)
  end
  if not (sum and at and sum >= 0 and sum < LOG_WRAP and units >= 1 and units <= LOG_WRAP) then return nil end
  if not (at > 0 and at < LOG_WRAP and at % 1 == 0 and sum % 1 == 0) then return nil end
  return { member = member, at = at, sum = sum, units = units }
end

-- Units from the start of entry `a` to the end of entry `b`.
local function log_units(a, b)
  local between = b.sum - a.sum
  if between < 0 then between = between + LOG_WRAP end
  return between + a.units
end

-- The state of a key at `time`, or at its newest entry if that is later; nil and perhaps an error if it isn't ours.
local function log_read(key, time, per)
  local reply = redis.pcall('ZRANGE', key, '-1', '-1', 'WITHSCORES')
  if reply.err then return nil, reply end
  local now, left, used, stale, oldest, newest = time, time - per, 0, 0, nil, nil
  if reply[1] then
    newest = log_entry(reply)
    if not newest then return nil end
    if newest.at > now then now, left = newest.at, newest.at - per end
    local first = log_entry(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES'))
    if not first then return nil end
    if first.at > left then
      oldest = first
    elseif newest.at > left then
      oldest = log_entry(redis.call('ZRANGEBYSCORE', key, integer(left + 1), '+inf', 'WITHSCORES', 'LIMIT', '0', '1'))
      if not oldest then return nil end
      stale = log_units(first, oldest) - oldest.units
    else
      stale = log_units(first, newest)
    end
    if oldest then used = log_units(oldest, newest) end
  end
  return {
    key = key, per = per, now = now, left = left,
    used = used, oldest = oldest, newest = newest,
    -- At least as many units as entries that have left.
    stale = stale,
  }
end

-- When the oldest `need` of the units in use, 1 <= need <= used, have left; nil if an entry isn't ours.
local function log_frees(log, need)
  local oldest, newest = log.oldest, log.newest
  if need <= oldest.units then return oldest.at + log.per end
  if need > log.used - newest.units then return newest.at + log.per end
  -- A search by rank. `high` always suffices: an entry has at least one unit. In a log of single units
  -- the first guess ends it.
  local low = log.stale > 0 and redis.call('ZCOUNT', log.key, '-inf', integer(log.left)) or 0
  local high = math.min(low + need, redis.call('ZCARD', log.key)) - 1
  local guess, entry, found = high - 1, nil, nil
  while low < high do
    entry = log_entry(redis.call('ZRANGE', log.key, guess, guess, 'WITHSCORES'))
    if not entry then return nil end
    if log_units(oldest, entry) >= need then
      high, found = guess, entry
    else
      low = guess + 1
    end
    guess = math.floor((low + high) / 2)
  end
  found = found or log_entry(redis.call('ZRANGE', log.key, high, high, 'WITHSCORES'))
  return found and found.at + log.per
end

-- Takes `cost` units, at least 1; an error if Redis doesn't let us write, and then nothing was written.
local function log_charge(log, cost)
  local last = log.newest
  local merged = last and last.at == log.now
  local sum = last and last.sum or 0
  -- In this order no number passes 2^53.
  if cost >= LOG_WRAP - sum then sum = cost - (LOG_WRAP - sum) else sum = sum + cost end
  local units = merged and last.units + cost or cost
  local member = units == 1 and integer(sum) or string.format('%d:%d', sum, units)
  local reply = redis.pcall('ZADD', log.key, integer(log.now), member)
  if type(reply) == 'table' and reply.err then return reply end
  if merged then redis.call('ZREM', log.key, last.member) end
  if log.stale > LOG_TRIM then
    -- None, if the new entry took the place of the only one: after 2^53 units sums come again.
    local count = math.min(LOG_TRIM, redis.call('ZCOUNT', log.key, '-inf', integer(log.left)))
    if count > 0 then redis.call('ZREMRANGEBYRANK', log.key, '0', integer(count - 1)) end
  elseif log.stale > 0 then
    redis.call('ZREMRANGEBYSCORE', log.key, '-inf', integer(log.left))
  end
  redis.call('PEXPIREAT', log.key, integer(math.ceil((log.now + log.per) / 1000)))
  log.newest = { member = member, at = log.now, sum = sum, units = units }
  if not log.oldest or log.oldest.at == log.now then log.oldest = log.newest end
  log.used = log.used + cost
end

rules.l = { read = log_read, frees = log_frees, charge = log_charge }
