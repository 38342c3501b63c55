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
-- What changes a state leaves state.used right and return an error if Redis doesn't let us write; then nothing was written.

local rules = {}

local time = ARGV[1]
if time == '' then
  time = redis.call('TIME')
  time = time[1] * 1000000 + time[2]
else
  time = tonumber(time)
end

-- A number as Redis reads it: exact to 2^53, and quicker than what redis.call makes of a number.
local function integer(value)
  return string.format('%d', value)
end

-- What to answer when the n-th key can't be read.
local function unreadable(n, err)
  if err and not string.find(err.err, 'WRONGTYPE', 1, true) then return err end
  return { err = 'FOREIGN ' .. n }
end
