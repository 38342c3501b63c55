-- token_bucket: the rule of token_bucket.rs over one string. The debt is in units of 1 / per:
--   time:debt:rate
--   time:debt:rate:start             with a warm-up: when the last one started
--   time:debt:rate:start:debt:u,u,.. with costs that are settled later: the start of a history, the
--                                    debt at that time, and the units charged since then in each
--                                    64th of the period
--   ..;last:units,last:units,..      after any of these, the outstanding leases. Their units are
--                                    absent until the lease ends; at that moment they become a debt
--
-- Products and quotients are exact: no number that counts exceeds 2^53, and fmod does not round,
-- unlike the operator % of Lua.

-- section: plain check
-- A charge to a bucket without a warm-up, leases and a history; of a queue, with its slack.
local value_N, charged_at_N, debt_N, rate_N = try('GET', KEY), 0, 0, 0
if value_N then
  if type(value_N) ~= 'string' then break end
  charged_at_N, debt_N, rate_N = string.match(value_N, '^(%d+):(%d+):(%d+)$')
  if not charged_at_N then break end
  charged_at_N, debt_N, rate_N = charged_at_N + 0, debt_N + 0, rate_N + 0
  if charged_at_N > now or debt_N > 9007199254740992 or rate_N > 9007199254740992 then break end
end
local per_N, paid_rate_N = PER + 0, rate_N
rate_N = PARAMETER + 0
if paid_rate_N < rate_N then paid_rate_N = rate_N end
debt_N = debt_N - (now - charged_at_N) * paid_rate_N
if debt_N < 0 then debt_N = 0 end
debt_N = debt_N + COST * per_N
local owed_N = debt_N
if SLACK then
  owed_N = debt_N - SLACK
  if owed_N < 0 then owed_N = 0 end
end
if owed_N > CAPACITY * per_N then break end
-- end section

-- section: plain charge
call('SET', KEY, format('%d:%d:%d', now, debt_N, rate_N), 'PXAT',
  format('%d', math.ceil((now + (debt_N + -debt_N % rate_N) / rate_N) / 1000)))
local used_N, growth_N = (owed_N + -owed_N % per_N) / per_N, 0
local remaining_N = CAPACITY - used_N
if used_N > 0 then
  growth_N = owed_N - (used_N - 1) * per_N
  growth_N = now + (growth_N + -growth_N % rate_N) / rate_N
end
if SLACK and debt_N > per_N then delay = math.max(delay, (debt_N - per_N + (per_N - debt_N) % rate_N) / rate_N) end
-- end section

local BUCKET_MAX = 9007199254740992

local function bucket_ceil(a, b)
  local rest = math.fmod(a, b)
  return (a - rest) / b + (rest > 0 and 1 or 0)
end

-- Converts the time since the start of a warm-up, with steps of `width`, to the time in which the
-- full rate adds as many units. All in us.
local function bucket_full_rate_time(since, width)
  local over = max(0, since - 100 * width)
  since = since - over
  local steps = math.floor(since / width)
  local whole = width * steps * (99 + steps)
  return over + math.floor((whole + (since - width * steps) * (100 + 2 * steps)) / 300)
end

-- The inverse of bucket_full_rate_time: the shortest time since the start of a warm-up in which as
-- many units are added as in `worth` us at the full rate. All in us.
local function bucket_warm_up_time(worth, width)
  local rest = worth - bucket_full_rate_time(100 * width, width)
  if rest >= 0 then return 100 * width + rest end
  worth = 300 * worth
  local steps = math.floor((math.sqrt(9801 + math.floor(4 * worth / width)) - 99) / 2)
  return width * steps + math.ceil((worth - width * steps * (99 + steps)) / (100 + 2 * steps))
end

-- Units that a cold bucket is missing and leased units can't be taken. A queue has a `slack`.
local function bucket_update_used_units(bucket)
  bucket.owed = max(bucket.debt, bucket.min_owed or 0)
  local owed = bucket.slack and max(0, bucket.owed - bucket.slack) or bucket.owed
  bucket.used_units = bucket_ceil(owed, bucket.per) + bucket.absent
end

-- bucket_at for a bucket with a warm-up.
local function bucket_at_warm_up(key, now, per, parameters, debt_at, debt, debt_rate, rest)
  local rate, warm_up, missing = match(parameters, '^(%d+)%+(%d+)%+(%d+)$')
  rate, warm_up, missing = tonumber(rate), tonumber(warm_up), tonumber(missing)
  local start, width = tonumber(match(rest, '^:(%d+)$')) or 0, math.ceil(warm_up / 100)
  local bucket = {
    key = key, now = now, per = per, rate = rate, pay_rate = max(rate, debt_rate, 1), debt_at = debt_at,
    stored_debt = debt, debt_rate = debt_rate, rest = rest, warm_up = warm_up, missing = missing, start = start,
    width = width, cold_at = debt_at == 0 and 0 or debt_at + warm_up,
    worth = bucket_full_rate_time(now - start, width), absent = 0, leases = {}, parameters = parameters,
  }
  bucket.debt = max(0, debt - (bucket.worth - bucket_full_rate_time(debt_at - start, width)) * bucket.pay_rate)
  if now < bucket.cold_at then
    missing = missing - math.floor(missing * min(100, math.floor((now - start) / width)) / 100)
  end
  bucket.min_owed = missing * per
  bucket_update_used_units(bucket)
  return bucket
end

-- Returns a bucket at `now`, without leases, from its stored fields. `debt_at` is the time of the
-- stored debt, `debt_rate` the rate then.
local function bucket_at(key, now, per, parameters, debt_at, debt, debt_rate, rest)
  local rate = tonumber(parameters)
  if not rate then return bucket_at_warm_up(key, now, per, parameters, debt_at, debt, debt_rate, rest) end
  local pay_rate = max(rate, debt_rate, 1)
  -- A product above 2^53 may be rounded, but it is larger than any debt.
  local owed = max(0, debt - (now - debt_at) * pay_rate)
  return {
    key = key, now = now, per = per, rate = rate, pay_rate = pay_rate, debt_at = debt_at, stored_debt = debt,
    debt_rate = debt_rate, rest = rest, debt = owed, owed = owed, used_units = bucket_ceil(owed, per),
    settles = false, absent = 0, leases = {}, parameters = parameters,
  }
end

-- Returns the charge history, if one exists for the present rate.
local function bucket_read_history(bucket)
  local start, debt, list = match(bucket.rest, '^:(%d+):(%d+):([%d,]+)$')
  start = tonumber(start)
  if not start or start > bucket.now or bucket.debt_rate ~= bucket.rate then return nil end
  local history = { start = start, debt = tonumber(debt), width = math.ceil(bucket.per / 64) }
  for units in string.gmatch(list, '%d+') do history[#history + 1] = tonumber(units) end
  return history
end

local function bucket_store_history(bucket, history)
  local texts = {}
  for n = 1, #history do texts[n] = format('%.0f', history[n]) end
  bucket.rest = format(':%.0f:%.0f:', history.start, history.debt) .. table.concat(texts, ',')
end

-- Returns a debt after `time` us of payment and a charge of `units`.
local function bucket_pay_and_charge(bucket, debt, time, units)
  return min(BUCKET_MAX, max(0, debt - time * bucket.rate) + units * bucket.per)
end

local function bucket_record_charge(bucket, units)
  local history = bucket.owed > 0 and bucket_read_history(bucket)
    or { start = bucket.now, debt = bucket.owed, width = math.ceil(bucket.per / 64) }
  local part = math.floor((bucket.now - history.start) / history.width) + 1
  while part > 64 do
    local parts = history[1] and 1 or part - 64
    history.debt = bucket_pay_and_charge(bucket, history.debt, parts * history.width, table.remove(history, 1) or 0)
    history.start, part = history.start + parts * history.width, part - parts
  end
  for n = #history + 1, part do history[n] = 0 end
  history[#history] = min(BUCKET_MAX, history[#history] + units)
  bucket_store_history(bucket, history)
end

-- Sets the debt, by a charge of at most `units`, without writing it.
local function bucket_update_debt(bucket, debt, units)
  if bucket.warm_up then
    if bucket.now >= bucket.cold_at then bucket.start, bucket.worth = bucket.now, 0 end
    bucket.cold_at, bucket.rest = bucket.now + bucket.warm_up, format(':%.0f', bucket.start)
  elseif not bucket.slack
    and (bucket.settles or bucket.rest ~= '' and bucket.owed > 0 and bucket_read_history(bucket)) then
    -- While units may be returned, the history has every charge.
    bucket_record_charge(bucket, units)
  else
    bucket.rest = ''
  end
  debt = min(BUCKET_MAX, debt)
  bucket.debt_at, bucket.stored_debt, bucket.debt_rate, bucket.pay_rate =
    bucket.now, debt, bucket.rate, max(1, bucket.rate)
  bucket.debt = debt
  bucket_update_used_units(bucket)
end

-- Returns the bucket after the end of its first lease.
local function bucket_expire_first_lease(bucket)
  local last, units = bucket.leases[1][1], bucket.leases[1][2]
  local later = bucket_at(bucket.key, last, bucket.per, bucket.parameters,
    bucket.debt_at, bucket.stored_debt, bucket.debt_rate, bucket.rest)
  bucket_update_debt(later, later.owed + units * later.per, units)
  later.leases, later.absent = { unpack(bucket.leases, 2) }, bucket.absent - units
  return later
end

-- Returns the state of a key at `time`, or at its last charge if that is later. Returns nil and
-- perhaps an error if the value is foreign.
-- The limit pays back `rate` units per `per`. A bucket pays back at the rate of its last charge if
-- that is higher. `parameters` is the rate, or with a warm-up `rate+warm_up+units that a cold
-- bucket is missing`.
local function bucket_read(key, time, per, parameters)
  local value = try('GET', key)
  if not value then return bucket_at(key, time, per, parameters, 0, 0, 0, '') end
  if type(value) == 'table' then return nil, value end
  local debt_at, debt, debt_rate, rest, lease_list = match(value, '^(%d+):(%d+):(%d+)([%d:,]*);?([%d:,]*)$')
  debt_at, debt, debt_rate = tonumber(debt_at), tonumber(debt), tonumber(debt_rate)
  if not debt_at or max(debt_at, debt, debt_rate) > BUCKET_MAX then return nil end
  local now = max(time, debt_at)
  if lease_list == '' then return bucket_at(key, now, per, parameters, debt_at, debt, debt_rate, rest) end
  local bucket = {
    key = key, per = per, parameters = parameters, debt_at = debt_at, stored_debt = debt, debt_rate = debt_rate,
    rest = rest, leases = {}, absent = 0,
  }
  for last, units in string.gmatch(lease_list, '(%d+):(%d+)') do
    bucket.leases[#bucket.leases + 1] = { tonumber(last), tonumber(units) }
    bucket.absent = bucket.absent + tonumber(units)
  end
  while bucket.leases[1] and bucket.leases[1][1] < now do bucket = bucket_expire_first_lease(bucket) end
  local leases, absent = bucket.leases, bucket.absent
  bucket = bucket_at(key, now, per, parameters, bucket.debt_at, bucket.stored_debt, bucket.debt_rate, bucket.rest)
  bucket.leases, bucket.absent = leases, absent
  bucket_update_used_units(bucket)
  return bucket
end

-- When the debt is at most `debt`.
local function bucket_debt_drop_time(bucket, debt)
  local wait = bucket_ceil(max(0, bucket.debt - debt), bucket.pay_rate)
  local drop_time = bucket.now + wait
  if bucket.warm_up and wait > 0 then
    drop_time = bucket.start + bucket_warm_up_time(bucket.worth + wait, bucket.width)
  end
  return min(BUCKET_MAX, drop_time)
end

-- Returns the time at which at most `units` are owed. Returns 0 if that needs further charges,
-- because without them the bucket becomes cold first.
local function bucket_owed_drop_time(bucket, units)
  local drop_time = bucket_debt_drop_time(bucket, units * bucket.per + (bucket.slack or 0))
  if not bucket.warm_up or units >= bucket.missing then return drop_time end
  local missing = bucket.missing
  drop_time = max(drop_time, bucket.start + math.ceil((missing - units) * 100 / missing) * bucket.width)
  return drop_time < bucket.cold_at and drop_time or 0
end

-- When the debt is paid and the bucket is cold. A later limit may have a lower rate than this one, so
-- only the rate of the last charge counts.
local function bucket_end_time(bucket)
  local pay_rate, debt = bucket.pay_rate, bucket.debt
  local slowest = max(1, bucket.debt_rate)
  if slowest < pay_rate then
    local time = bucket.warm_up and bucket.worth - bucket_full_rate_time(bucket.debt_at - bucket.start, bucket.width)
      or bucket.now - bucket.debt_at
    bucket.pay_rate, bucket.debt = slowest, max(0, bucket.stored_debt - time * slowest)
  end
  local end_time = max(bucket_debt_drop_time(bucket, 0), bucket.cold_at or 0)
  bucket.pay_rate, bucket.debt = pay_rate, debt
  return end_time
end

-- Returns the time at which `need` units fewer are used, 1 <= need <= used_units, or 0 as
-- `bucket_owed_drop_time` does. With `need` 0, the time at which the state ends.
local function bucket_release_time(bucket, need)
  local units = bucket.used_units - need
  while bucket.leases[1] do
    if need > 0 and units >= bucket.absent then
      local drop_time = bucket_owed_drop_time(bucket, units - bucket.absent)
      if drop_time <= bucket.leases[1][1] then return drop_time end
    end
    bucket = bucket_expire_first_lease(bucket)
  end
  if need == 0 then return bucket_end_time(bucket) end
  return bucket_owed_drop_time(bucket, units)
end

local function bucket_write(bucket)
  local value = format('%.0f:%.0f:%.0f%s', bucket.debt_at, bucket.stored_debt, bucket.debt_rate, bucket.rest)
  for n, lease in ipairs(bucket.leases) do
    value = value .. (n == 1 and ';' or ',') .. format('%.0f:%.0f', lease[1], lease[2])
  end
  local reply = try('SET', bucket.key, value, 'PXAT', integer(math.ceil(bucket_release_time(bucket, 0) / 1000)))
  if reply.err then return reply end
end

-- bucket_update_debt with a write. Returns an error if Redis rejects the write; then nothing was
-- written.
local function bucket_set_debt(bucket, debt, units)
  bucket_update_debt(bucket, debt, units)
  return bucket_write(bucket)
end

-- Takes `cost` units, at least 1. Errors as bucket_set_debt.
local function bucket_charge(bucket, cost)
  return bucket_set_debt(bucket, bucket.owed + cost * bucket.per, cost)
end

rules.t = { is_additive = true, read = bucket_read, release_time = bucket_release_time, charge = bucket_charge }

-- section: rejected charges
-- Takes the available units, up to `cost`. Errors as bucket_set_debt.
local function bucket_charge_rejected(bucket, cost, capacity)
  local max_debt = max(0, capacity - bucket.absent) * bucket.per + (bucket.slack or 0)
  local debt = min(max_debt, bucket.owed + cost * bucket.per)
  if debt > bucket.owed then
    return bucket_set_debt(bucket, debt, bucket_ceil(debt - bucket.owed, bucket.per))
  end
end

rules.t.charge_rejected = bucket_charge_rejected
-- end section

-- section: settlements
-- Returns those of the `units` charged at `charged_at` that still count. Errors as bucket_set_debt.
local function bucket_credit(bucket, units, charged_at)
  for n, lease in ipairs(bucket.leases) do
    if lease[1] == charged_at then
      local returned = min(units, lease[2])
      lease[2], bucket.absent, bucket.used_units =
        lease[2] - returned, bucket.absent - returned, bucket.used_units - returned
      if lease[2] == 0 then table.remove(bucket.leases, n) end
      return bucket_write(bucket)
    end
  end
  if bucket.debt == 0 then return end
  local history = bucket_read_history(bucket)
  local n = history and charged_at >= history.start and math.floor((charged_at - history.start) / history.width) + 1
  local new_debt
  if n and history[n] then
    history[n] = max(0, history[n] - units)
    bucket_store_history(bucket, history)
    local from = history.start
    new_debt = history.debt
    for m = 1, #history do
      new_debt = bucket_pay_and_charge(bucket, new_debt, min(history.width, bucket.now - from), history[m])
      from = from + history.width
    end
    new_debt = bucket_pay_and_charge(bucket, new_debt, max(0, bucket.now - from), 0)
  else
    local unpaid = max(0, units * bucket.per - max(0, bucket.now - charged_at) * bucket.pay_rate)
    new_debt = max(0, bucket.debt - unpaid)
  end
  local returned = max(0, bucket.debt - new_debt)
  bucket.stored_debt, bucket.debt = bucket.stored_debt - returned, bucket.debt - returned
  bucket_update_used_units(bucket)
  return bucket_write(bucket)
end

rules.t.credit = bucket_credit
-- end section

-- section: leases
local function bucket_grantable_until(bucket, last)
  local newest = bucket.leases[#bucket.leases]
  return not bucket.warm_up and #bucket.leases < 64 and not (newest and newest[1] > last) and last
end

-- Takes units that are absent until `last`. Errors as bucket_set_debt.
local function bucket_grant(bucket, units, last)
  local newest = bucket.leases[#bucket.leases]
  if newest and newest[1] == last then
    newest[2] = newest[2] + units
  else
    bucket.leases[#bucket.leases + 1] = { last, units }
  end
  bucket.absent, bucket.used_units = bucket.absent + units, bucket.used_units + units
  return bucket_write(bucket)
end

rules.t.grantable_until, rules.t.grant = bucket_grantable_until, bucket_grant
-- end section
