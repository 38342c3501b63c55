-- concurrency: the rule of concurrency.rs over one ZSET. Each member is a slot; its score is the
-- time in us at which the slot expires.

-- Returns the state of a key at `time`; nil and perhaps an error if the value is foreign.
local function slots_read(key, time, per, slot)
  local used_units = try('ZCOUNT', key, integer(time + 1), '+inf')
  if type(used_units) == 'table' then return nil, used_units end
  return { key = key, now = time, per = per, used_units = used_units, slot = slot }
end

-- The end of a request is unknown.
-- Returns 0: the time at which a slot is released is unknown.
local function slots_release_time()
  return 0
end

-- Holds the slot for another `per`, also one that has expired. Returns an error if Redis rejects
-- the write; then nothing was written.
local function slots_renew(slots, slot)
  local reply = try('ZADD', slots.key, integer(slots.now + slots.per), slot)
  if type(reply) == 'table' then return reply end
  call('ZREMRANGEBYSCORE', slots.key, '-inf', integer(slots.now))
  -- Another slot may expire later: a reload may have shortened `per`.
  local last = call('ZRANGE', slots.key, '-1', '-1', 'WITHSCORES')
  call('PEXPIREAT', slots.key, integer(math.ceil(last[2] / 1000)))
  slots.used_units = call('ZCARD', slots.key)
end

local function slots_charge(slots)
  return slots_renew(slots, slots.slot)
end

local function slots_release(slots, slot)
  call('ZREM', slots.key, slot)
end

rules.c = {
  read = slots_read, release_time = slots_release_time, charge = slots_charge, renew = slots_renew,
  release = slots_release,
}
