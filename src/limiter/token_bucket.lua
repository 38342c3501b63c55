-- token_bucket: the rule of token_bucket.rs over one string, the debt in units of 1 / per:
--   time:debt:rate
--   time:debt:rate:start               with a warm-up: when the last one began
--   time:debt:rate:start:debt:u,u,…    with costs that are settled later: what is charged since `start`, when the
--                                      debt was so large, in 64ths of the period
--   …;last:units,last:units,…          behind any of them, what is lent: absent until its end, and then a debt that was
--                                      made at that moment
--
-- Products and quotients are exact: nothing that counts passes 2^53, and fmod, unlike Lua's %, does not round.

local LAST = 9007199254740992

local function bucket_ceil(a, b)
  local rest = math.fmod(a, b)
  return (a - rest) / b + (rest > 0 and 1 or 0)
end

-- Microseconds at the full rate in which as much flows in as in so many of a warm-up, in steps of `width`.
local function bucket_worth(since, width)
  local over = max(0, since - 100 * width)
  since = since - over
  local steps = math.floor(since / width)
  local whole = width * steps * (99 + steps)
  return over + math.floor((whole + (since - width * steps) * (100 + 2 * steps)) / 300)
end

-- The shortest time that is worth so much.
local function bucket_lasts(worth, width)
  local rest = worth - bucket_worth(100 * width, width)
  if rest >= 0 then return 100 * width + rest end
  worth = 300 * worth
  local steps = math.floor((math.sqrt(9801 + math.floor(4 * worth / width)) - 99) / 2)
  return width * steps + math.ceil((worth - width * steps * (99 + steps)) / (100 + 2 * steps))
end

-- What the capacity lacks can't be taken, nor what is lent.
local function bucket_use(bucket)
  bucket.owed = max(bucket.debt, bucket.least or 0)
  bucket.used = bucket_ceil(bucket.owed, bucket.per) + bucket.absent
end

-- What bucket_at says of a bucket with a warm-up.
local function bucket_warms(key, now, per, beside, at, debt, was, rest)
  local rate, warm, lacks = match(beside, '^(%d+)%+(%d+)%+(%d+)$')
  rate, warm, lacks = tonumber(rate), tonumber(warm), tonumber(lacks)
  local start, width = tonumber(match(rest, '^:(%d+)$')) or 0, math.ceil(warm / 100)
  local bucket = {
    key = key, now = now, per = per, rate = rate, pays = max(rate, was, 1), at = at, kept = debt, was = was,
    rest = rest, warm = warm, lacks = lacks, start = start, width = width, cold = at == 0 and 0 or at + warm,
    worth = bucket_worth(now - start, width), absent = 0, lent = {}, beside = beside,
  }
  bucket.debt = max(0, debt - (bucket.worth - bucket_worth(at - start, width)) * bucket.pays)
  if now < bucket.cold then
    lacks = lacks - math.floor(lacks * min(100, math.floor((now - start) / width)) / 100)
  end
  bucket.least = lacks * per
  bucket_use(bucket)
  return bucket
end

-- A bucket at `now`, without what is lent, from what is kept of it.
local function bucket_at(key, now, per, beside, at, debt, was, rest)
  local rate = tonumber(beside)
  if not rate then return bucket_warms(key, now, per, beside, at, debt, was, rest) end
  local pays = max(rate, was, 1)
  -- A product above 2^53 may be rounded, but stays above every debt.
  local owed = max(0, debt - (now - at) * pays)
  return {
    key = key, now = now, per = per, rate = rate, pays = pays, at = at, kept = debt, was = was, rest = rest,
    debt = owed, owed = owed, used = bucket_ceil(owed, per), settles = false, absent = 0, lent = {}, beside = beside,
  }
end

-- What was charged lately, if that is known at this rate.
local function bucket_past(bucket)
  local start, debt, list = match(bucket.rest, '^:(%d+):(%d+):([%d,]+)$')
  start = tonumber(start)
  if not start or start > bucket.now or bucket.was ~= bucket.rate then return nil end
  local past = { start = start, debt = tonumber(debt), width = math.ceil(bucket.per / 64) }
  for units in string.gmatch(list, '%d+') do past[#past + 1] = tonumber(units) end
  return past
end

local function bucket_keep(bucket, past)
  local texts = {}
  for n = 1, #past do texts[n] = format('%.0f', past[n]) end
  bucket.rest = format(':%.0f:%.0f:', past.start, past.debt) .. table.concat(texts, ',')
end

-- A debt after it was paid for so long, and charged.
local function bucket_pass(bucket, debt, time, units)
  return min(LAST, max(0, debt - time * bucket.rate) + units * bucket.per)
end

local function bucket_remember(bucket, units)
  local past = bucket.owed > 0 and bucket_past(bucket)
    or { start = bucket.now, debt = bucket.owed, width = math.ceil(bucket.per / 64) }
  local place = math.floor((bucket.now - past.start) / past.width) + 1
  while place > 64 do
    local parts = past[1] and 1 or place - 64
    past.debt = bucket_pass(bucket, past.debt, parts * past.width, table.remove(past, 1) or 0)
    past.start, place = past.start + parts * past.width, place - parts
  end
  for n = #past + 1, place do past[n] = 0 end
  past[#past] = min(LAST, past[#past] + units)
  bucket_keep(bucket, past)
end

-- Makes the debt so large, by `units` or less.
local function bucket_enter(bucket, debt, units)
  if bucket.warm then
    if bucket.now >= bucket.cold then bucket.start, bucket.worth = bucket.now, 0 end
    bucket.cold, bucket.rest = bucket.now + bucket.warm, format(':%.0f', bucket.start)
  elseif bucket.settles then
    bucket_remember(bucket, units)
  else
    bucket.rest = ''
  end
  debt = min(LAST, debt)
  bucket.at, bucket.kept, bucket.was, bucket.pays = bucket.now, debt, bucket.rate, max(1, bucket.rate)
  bucket.debt = debt
  bucket_use(bucket)
end

-- The bucket as it will be once the first of its leases has ended.
local function bucket_end(bucket)
  local last, units = bucket.lent[1][1], bucket.lent[1][2]
  local later =
    bucket_at(bucket.key, last, bucket.per, bucket.beside, bucket.at, bucket.kept, bucket.was, bucket.rest)
  bucket_enter(later, later.owed + units * later.per, units)
  later.lent, later.absent = { unpack(bucket.lent, 2) }, bucket.absent - units
  return later
end

-- The state of a key at `time`, or at its last charge if that is later; nil and perhaps an error if it isn't ours.
-- The limit pays back `rate` units per `per`; the bucket, what it paid back when it was charged, if that is more.
-- `beside` is the rate, or with a warm-up `rate+warm_up+units that a cold bucket lacks`.
local function bucket_read(key, time, per, beside)
  local value = try('GET', key)
  if not value then return bucket_at(key, time, per, beside, 0, 0, 0, '') end
  if type(value) == 'table' then return nil, value end
  local at, debt, was, rest, lent = match(value, '^(%d+):(%d+):(%d+)([%d:,]*);?([%d:,]*)$')
  at, debt, was = tonumber(at), tonumber(debt), tonumber(was)
  if not at or max(at, debt, was) > LAST then return nil end
  local now = max(time, at)
  if lent == '' then return bucket_at(key, now, per, beside, at, debt, was, rest) end
  local bucket = { key = key, per = per, beside = beside, at = at, kept = debt, was = was, rest = rest, lent = {}, absent = 0 }
  for last, units in string.gmatch(lent, '(%d+):(%d+)') do
    bucket.lent[#bucket.lent + 1] = { tonumber(last), tonumber(units) }
    bucket.absent = bucket.absent + tonumber(units)
  end
  while bucket.lent[1] and bucket.lent[1][1] < now do bucket = bucket_end(bucket) end
  local left, absent = bucket.lent, bucket.absent
  bucket = bucket_at(key, now, per, beside, bucket.at, bucket.kept, bucket.was, bucket.rest)
  bucket.lent, bucket.absent = left, absent
  bucket_use(bucket)
  return bucket
end

-- When the debt is at most this.
local function bucket_paid(bucket, debt)
  local wait = bucket_ceil(max(0, bucket.debt - debt), bucket.pays)
  local at = bucket.now + wait
  if bucket.warm and wait > 0 then
    at = bucket.start + bucket_lasts(bucket.worth + wait, bucket.width)
  end
  return min(LAST, at)
end

-- When at most `units` are in debt; 0 if only charges can warm the bucket up for that.
local function bucket_owes(bucket, units)
  local at = bucket_paid(bucket, units * bucket.per)
  if not bucket.warm or units >= bucket.lacks then return at end
  local lacks = bucket.lacks
  at = max(at, bucket.start + math.ceil((lacks - units) * 100 / lacks) * bucket.width)
  return at < bucket.cold and at or 0
end

-- When `need` units less are in use, 1 <= need <= used; 0 as above.
local function bucket_frees(bucket, need)
  local units = bucket.used - need
  while bucket.lent[1] do
    if units >= bucket.absent then
      local at = bucket_owes(bucket, units - bucket.absent)
      if at <= bucket.lent[1][1] then return at end
    end
    bucket = bucket_end(bucket)
  end
  return bucket_owes(bucket, units)
end

local function bucket_write(bucket)
  local value = format('%.0f:%.0f:%.0f%s', bucket.at, bucket.kept, bucket.was, bucket.rest)
  local last = bucket
  for n, one in ipairs(bucket.lent) do
    value = value .. (n == 1 and ';' or ',') .. format('%.0f:%.0f', one[1], one[2])
    last = bucket_end(last)
  end
  local expires = max(bucket_paid(last, 0), last.cold or 0)
  local reply = try('SET', bucket.key, value, 'PXAT', integer(math.ceil(expires / 1000)))
  if reply.err then return reply end
end

-- The same, written; an error if Redis doesn't let us write, and then nothing was written.
local function bucket_owe(bucket, debt, units)
  bucket_enter(bucket, debt, units)
  return bucket_write(bucket)
end

-- Takes `cost` units, at least 1; an error as bucket_owe.
local function bucket_charge(bucket, cost)
  return bucket_owe(bucket, bucket.owed + cost * bucket.per, cost)
end

rules.t = { adds = true, read = bucket_read, frees = bucket_frees, charge = bucket_charge }

-- only for counting
-- Takes what there is, up to `cost`; an error as bucket_owe.
local function bucket_press(bucket, cost, capacity)
  local most = max(0, capacity - bucket.absent) * bucket.per + (bucket.slack or 0)
  local debt = min(most, bucket.owed + cost * bucket.per)
  if debt > bucket.owed then
    return bucket_owe(bucket, debt, bucket_ceil(debt - bucket.owed, bucket.per))
  end
end

rules.t.press = bucket_press
-- end

-- only for amending
-- Gives back what still counts of `units` charged at `at`; an error as bucket_owe.
local function bucket_credit(bucket, units, at)
  for n, one in ipairs(bucket.lent) do
    if one[1] == at then
      local back = min(units, one[2])
      one[2], bucket.absent, bucket.used = one[2] - back, bucket.absent - back, bucket.used - back
      if one[2] == 0 then table.remove(bucket.lent, n) end
      return bucket_write(bucket)
    end
  end
  if bucket.debt == 0 then return end
  local past = bucket_past(bucket)
  local n = past and at >= past.start and math.floor((at - past.start) / past.width) + 1
  local left
  if n and past[n] then
    past[n] = max(0, past[n] - units)
    bucket_keep(bucket, past)
    local from = past.start
    left = past.debt
    for m = 1, #past do
      left = bucket_pass(bucket, left, min(past.width, bucket.now - from), past[m])
      from = from + past.width
    end
    left = bucket_pass(bucket, left, max(0, bucket.now - from), 0)
  else
    local still = max(0, units * bucket.per - max(0, bucket.now - at) * bucket.pays)
    left = max(0, bucket.debt - still)
  end
  local back = max(0, bucket.debt - left)
  bucket.kept, bucket.debt = bucket.kept - back, bucket.debt - back
  bucket_use(bucket)
  return bucket_write(bucket)
end

rules.t.credit = bucket_credit
-- end

-- only for lending
local function bucket_lends(bucket, last)
  local newest = bucket.lent[#bucket.lent]
  return not bucket.warm and #bucket.lent < 64 and not (newest and newest[1] > last) and last
end

-- Takes units that are absent until then; an error as bucket_owe.
local function bucket_lend(bucket, units, last)
  local newest = bucket.lent[#bucket.lent]
  if newest and newest[1] == last then
    newest[2] = newest[2] + units
  else
    bucket.lent[#bucket.lent + 1] = { last, units }
  end
  bucket.absent, bucket.used = bucket.absent + units, bucket.used + units
  return bucket_write(bucket)
end

rules.t.lends, rules.t.lend = bucket_lends, bucket_lend
-- end
