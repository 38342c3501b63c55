-- token_bucket: the rule of token_bucket.rs over one string, `time:debt:rate`, the debt in units of 1 / per.
--
-- Products and quotients are exact: nothing that counts passes 2^53, and fmod, unlike Lua's %, does not round.

local function bucket_ceil(a, b)
  local rest = math.fmod(a, b)
  return (a - rest) / b + (rest > 0 and 1 or 0)
end

-- The state of a key at `time`, or at its last charge if that is later; nil and perhaps an error if it isn't ours.
-- The limit pays back `rate` units per `per`; the bucket, what it paid back when it was charged, if that is more.
local function bucket_read(key, time, per, rate)
  local value = redis.pcall('GET', key)
  local at, debt, was = 0, 0, 0
  if value then
    if type(value) == 'table' then return nil, value end
    at, debt, was = string.match(value, '^(%d+):(%d+):(%d+)$')
    at, debt, was = tonumber(at), tonumber(debt), tonumber(was)
    if not at or math.max(at, debt, was) > 9007199254740992 then return nil end
  end
  local now, pays = math.max(time, at), math.max(rate, was, 1)
  -- A product above 2^53 may be rounded, but stays above every debt.
  debt = math.max(0, debt - (now - at) * pays)
  return { key = key, now = now, per = per, rate = rate, pays = pays, debt = debt, used = bucket_ceil(debt, per) }
end

-- When the debt is `need` units less, 1 <= need <= used.
local function bucket_frees(bucket, need)
  local over = bucket.debt - (bucket.used - need) * bucket.per
  return bucket.now + bucket_ceil(over, bucket.pays)
end

-- Takes `cost` units, at least 1; an error if Redis doesn't let us write, and then nothing was written.
local function bucket_charge(bucket, cost)
  bucket.debt = bucket.debt + cost * bucket.per
  bucket.used = bucket_ceil(bucket.debt, bucket.per)
  bucket.pays = bucket.rate
  local value = string.format('%.0f:%.0f:%.0f', bucket.now, bucket.debt, bucket.rate)
  local expires = math.ceil((bucket.now + bucket_ceil(bucket.debt, bucket.rate)) / 1000)
  local reply = redis.pcall('SET', bucket.key, value, 'PXAT', expires)
  if reply.err then return reply end
end

rules.t = { read = bucket_read, frees = bucket_frees, charge = bucket_charge }
