-- What stands before the algorithms' files. Each of them enters its functions into `rules` by its letter:
--   read(key, time, per, beside)  the state of a key; nil and perhaps an error if it isn't ours
--   frees(state, need)            when `need` of the units in use have come back (us); 0: nobody knows
--   charge(state, cost)           takes units, at least 1
--   press(state, cost, capacity)  takes them as far as the capacity goes, though they were refused
--   credit(state, units, at)      gives back some of the units that were charged at `at`
--   lends(state, last)            the last moment at which what is lent now may be used, `last` or earlier; nil or
--                                 false: nothing is lent
--   lend(state, units, last)      takes units, at least 1, that are used by then
--   renew, release(state, slot)   of slots
--   adds                          whether charges at the same time are as one charge of all their units
-- What changes a state leaves state.used right and returns an error if Redis doesn't let us write; then nothing was
-- written. What charges one says where it stands (us) in state.stands, if that isn't state.now.
-- Every function here is made anew by each call, so the texts hold only those that the program needs: what stands
-- between `-- only for <purpose>` and `-- end` is left out of the others.

local rules = {}
local call, try = redis.call, redis.pcall
local format, match, max, min = string.format, string.match, math.max, math.min

-- A number as Redis reads it: exact to 2^53, and quicker than what redis.call makes of a number.
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
