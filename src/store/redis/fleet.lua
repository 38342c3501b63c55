-- Who shares the limits: a ZSET of the instances' ids, the score of each the time in us at which it was last heard of.
--
-- KEYS[1]  the set
-- ARGV     the instance's id; what it does: beat (it lives), look; how long the silent are kept, in us; since when the
--          others shall have been heard, in us, empty: now
-- Reply    the time in us; instances that live; how many of them have lower ids than this one; how many were heard

local id, what, kept = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = tonumber(ARGV[4]) or now
if what == 'beat' then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%d', now - kept))
  redis.call('ZADD', KEYS[1], string.format('%d', now), id)
  redis.call('PEXPIRE', KEYS[1], string.format('%d', kept / 1000))
end
local lower = 0
local all = redis.call('ZRANGE', KEYS[1], '0', '-1')
for n = 1, #all do
  if all[n] < id then lower = lower + 1 end
end
return { now, #all, lower, redis.call('ZCOUNT', KEYS[1], string.format('%d', since), '+inf') }
