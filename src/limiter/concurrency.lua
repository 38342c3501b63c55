-- concurrency: the rule of concurrency.rs over one ZSET: a member per slot, its score the time in us at which it ends.

-- The state of a key at `time`; nil and perhaps an error if it isn't ours.
local function slots_read(key, time, per, slot)
  local used = try('ZCOUNT', key, integer(time + 1), '+inf')
  if type(used) == 'table' then return nil, used end
  return { key = key, now = time, per = per, used = used, slot = slot }
end

-- When a request ends nobody knows.
local function slots_frees()
  return 0
end

-- Holds the slot for a lease, one that was lost as well; an error if Redis doesn't let us write, and then nothing was
-- written.
local function slots_renew(slots, slot)
  local reply = try('ZADD', slots.key, integer(slots.now + slots.per), slot)
  if type(reply) == 'table' then return reply end
  call('ZREMRANGEBYSCORE', slots.key, '-inf', integer(slots.now))
  -- Another lease may be longer, if a reload has made ours shorter.
  local last = call('ZRANGE', slots.key, '-1', '-1', 'WITHSCORES')
  call('PEXPIREAT', slots.key, integer(math.ceil(last[2] / 1000)))
  slots.used = call('ZCARD', slots.key)
end

local function slots_charge(slots)
  return slots_renew(slots, slots.slot)
end

local function slots_release(slots, slot)
  call('ZREM', slots.key, slot)
end

rules.c = { read = slots_read, frees = slots_frees, charge = slots_charge, renew = slots_renew, release = slots_release }
