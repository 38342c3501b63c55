-- Lists the instances that share the limits, for operators. It reads the set of heartbeats only:
-- see membership.lua.
--
-- KEYS[1]  the set of heartbeats
-- ARGV[1]  how long an instance stays in the set after its last heartbeat, in us
-- ARGV[2]  the maximum number of listed instances
-- Reply    the time in us, the number of instances in the set, and the listed instances: each
--          entry, followed by its score

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = string.format('%d', now - tonumber(ARGV[1]))
local total = redis.call('ZCARD', KEYS[1])
return { now, total, redis.call('ZRANGEBYSCORE', KEYS[1], since, '+inf', 'WITHSCORES', 'LIMIT', '0', ARGV[2]) }
