-- Counts the instances that share the limits. One ZSET has the ids of the instances, each with the
-- time in us of its last heartbeat as the score. A second ZSET has the same ids, all with score 0,
-- for their rank. No step reads a whole set: the cost grows with the logarithm of the instance
-- count.
--
-- KEYS     the two sets
-- ARGV[1]  the entry of the instance: its id, and for newer versions a space and its description
-- ARGV[2]  the operation: `heartbeat` (alive, nothing left to write back), `pending` (alive, with
--          usage to write back: its score is 2^52 higher) or `read`
-- ARGV[3]  how long an instance stays in the sets after its last heartbeat, in us
-- ARGV[4]  the reply counts recovered instances heard from since this time (us); empty: now
-- ARGV[5]  when the caller stops waiting for the reply (us); empty: unknown. A server that hung
--          runs the command later, when it may no longer be true: then a heartbeat counts as
--          `pending`
-- Reply    the time in us, the live instances, the live instances with a lower id, the
--          recovered instances: heard from since ARGV[4], with nothing left to write back

local id, operation, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local pending_offset = 2 ^ 52
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = tonumber(ARGV[4]) or now
if now > (tonumber(ARGV[5]) or now) and operation == 'heartbeat' then operation = 'pending' end
if operation ~= 'read' then
  for _, offset in ipairs({ 0, pending_offset }) do
    local lowest, highest = string.format('%d', offset), string.format('(%d', offset + now - ttl)
    for _, expired in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], lowest, highest)) do
      redis.call('ZREM', KEYS[1], expired)
      redis.call('ZREM', KEYS[2], expired)
    end
  end
  redis.call('ZADD', KEYS[1], string.format('%d', operation == 'pending' and pending_offset + now or now), id)
  redis.call('ZADD', KEYS[2], '0', id)
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, string.format('%d', ttl / 1000))
  end
end
local live = redis.call('ZCARD', KEYS[1])
local rank = redis.call('ZLEXCOUNT', KEYS[2], '-', '(' .. id)
local recovered = redis.call('ZCOUNT', KEYS[1], string.format('%d', since), string.format('(%d', pending_offset))
return { now, live, rank, recovered }
