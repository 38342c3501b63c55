-- Who shares the limits: a ZSET of the instances' ids, the score of each the time in us at which it was last heard of.
--
-- KEYS[1]  the set
-- ARGV     the instance's id; what it does: beat (it lives and has told all), owe (it lives and still has to tell
--          something: half a microsecond in its score says so), look; how long the silent are kept, in us; since when
--          the others shall have been heard, in us, empty: now; until when the asker waits, in us, empty: nobody knows.
--          A server that hung hears late what is no longer true: then nothing has been told
-- Reply    the time in us; instances that live; how many of them have lower ids than this one; how many were heard and
--          have told all

local id, what, kept = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = tonumber(ARGV[4]) or now
if now > (tonumber(ARGV[5]) or now) and what == 'beat' then what = 'owe' end
if what ~= 'look' then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%d', now - kept))
  redis.call('ZADD', KEYS[1], string.format(what == 'owe' and '%d.5' or '%d', now), id)
  redis.call('PEXPIRE', KEYS[1], string.format('%d', kept / 1000))
end
local lower, heard = 0, 0
local all = redis.call('ZRANGE', KEYS[1], '0', '-1', 'WITHSCORES')
for n = 1, #all, 2 do
  local at = tonumber(all[n + 1])
  if all[n] < id then lower = lower + 1 end
  if at >= since and at % 1 == 0 then heard = heard + 1 end
end
return { now, #all / 2, lower, heard }
