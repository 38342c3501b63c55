-- Puts right what was charged before. Stands after the files of the algorithms that it changes.
--
-- KEYS     one per amendment; a key may come again
-- ARGV[1]  as for a decision
-- ARGV     then six per amendment: algorithm (its letter), per in us, what the algorithm needs beside, what to do
--          (charge: further units, whether they fit or not; credit: units that were charged at a time are given back;
--          renew, release: a slot), the units or the slot, and the time in us (charge: how long ago)
-- Reply    1, or an error if one failed; the others were made. A key that isn't ours is left as it is.

local failed
for n = 1, #KEYS do
  local arg = n * 6 - 4
  local rule, beside, what = rules[ARGV[arg]], ARGV[arg + 2], ARGV[arg + 3]
  local at = what == 'charge' and math.max(0, time - tonumber(ARGV[arg + 5])) or time
  local state, err = rule.read(KEYS[n], at, tonumber(ARGV[arg + 1]), tonumber(beside) or beside)
  if err and string.find(err.err, 'WRONGTYPE', 1, true) then err = nil end
  if state and rule[what] then
    state.settles = true
    err = rule[what](state, tonumber(ARGV[arg + 4]) or ARGV[arg + 4], tonumber(ARGV[arg + 5]))
  end
  failed = err or failed
end
return failed or 1
