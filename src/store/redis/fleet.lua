-- Who shares the limits: a ZSET of the instances' ids, the score of each the time in us at which it was last heard of;
-- and one of the same ids, all with the score 0, which tells places. No step reads all of either: the cost grows with
-- the logarithm of their number.
--
-- KEYS     the sets
-- ARGV     the instance's id; what it does: beat (it lives and has told all), owe (it lives and still has to tell
--          something: 2^52 more in its score say so), look; how long the silent are kept, in us; since when
--          the others shall have been heard, in us, empty: now; until when the asker waits, in us, empty: nobody knows.
--          A server that hung hears late what is no longer true: then nothing has been told
-- Reply    the time in us; instances that live; how many of them have lower ids than this one; how many were heard and
--          have told all

local id, what, kept = ARGV[1], ARGV[2], tonumber(ARGV[3])
local owing = 2 ^ 52
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = tonumber(ARGV[4]) or now
if now > (tonumber(ARGV[5]) or now) and what == 'beat' then what = 'owe' end
if what ~= 'look' then
  for _, from in ipairs({ 0, owing }) do
    local first, last = string.format('%d', from), string.format('(%d', from + now - kept)
    for _, silent in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], first, last)) do
      redis.call('ZREM', KEYS[1], silent)
      redis.call('ZREM', KEYS[2], silent)
    end
  end
  redis.call('ZADD', KEYS[1], string.format('%d', what == 'owe' and owing + now or now), id)
  redis.call('ZADD', KEYS[2], '0', id)
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, string.format('%d', kept / 1000))
  end
end
local live = redis.call('ZCARD', KEYS[1])
local lower = redis.call('ZLEXCOUNT', KEYS[2], '-', '(' .. id)
local heard = redis.call('ZCOUNT', KEYS[1], string.format('%d', since), string.format('(%d', owing))
return { now, live, lower, heard }
