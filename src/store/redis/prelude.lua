-- The start of every general program: the rule table, aliases and the time. The algorithm files
-- follow. A plain program (plain.lua) ends with a general one.
--
-- Each algorithm file adds one table of functions to `rules`, under its letter:
--   read(key, time, per, parameters)       returns the state of a key. Returns nil and perhaps an
--                                          error if the key holds a foreign value
--   release_time(state, need)              when `need` of the used units are free again (us);
--                                          0: unknown. With a `need` of 0: when the state becomes
--                                          that of a new key, if its time, state.now, goes on
--   charge(state, cost)                    takes units, at least 1
--   charge_rejected(state, cost, capacity) takes units of a rejected request, up to the capacity
--   credit(state, units, charged_at)       returns some of the units charged at `charged_at`
--   credits_together                       true if `credit` instead takes a list of these pairs
--   grantable_until(state, last)           the last moment at which leased units may be used,
--                                          `last` or earlier; nil or false: no lease is possible
--   grant(state, units, last)              takes units, at least 1, for a lease that ends at `last`
--   renew, release(state, slot)            for concurrency slots
--   is_additive                            true if several charges at one time have the effect of
--                                          one charge of their sum
--   is_block                               true for the rule `block`
-- A function that changes a state keeps state.used_units correct. It returns an error if Redis
-- rejects its write; then nothing was written. A charge sets state.charged_at (us) to the time
-- under which it is recorded, if that differs from state.now.
-- Redis creates every function again on each call, so a program contains only the sections it
-- needs. strip_source leaves out a part between `-- section: <purpose>` and `-- end section` if the
-- program does not serve that purpose.

local rules = {}
local call, try = redis.call, redis.pcall
local format, find, match, max, min = string.format, string.find, string.match, math.max, math.min

-- Formats a number for Redis: exact to 2^53, and faster than the conversion in redis.call.
local function integer(value)
  return format('%d', value)
end

local time = ARGV[1]
if time == '' then
  time = call('TIME')
  time = time[1] * 1000000 + time[2]
else
  time = tonumber(time)
end
