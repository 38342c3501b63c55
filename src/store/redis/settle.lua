-- Settles earlier charges. In a program, this file follows those of the algorithms.
--
-- KEYS     one per settlement; a key may occur several times
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then six per settlement: the letter of the algorithm, the period in us, the algorithm's
--          parameters, the operation, the units or the slot, and a time in us:
--            charge   takes further units, even beyond the capacity; the time is their age
--            credit   returns units; the time is that of their charge
--            renew    keeps a slot for another `per`
--            release  frees a slot
-- Reply    1, or the error of a failed settlement; the others were made. A key with a foreign value
--          is left unchanged.

local failed
local n = 1
while n <= #KEYS do
  local key, arg = KEYS[n], n * 6 - 4
  local rule, parameters, operation = rules[ARGV[arg]], ARGV[arg + 2], ARGV[arg + 3]
  local effective_time = operation == 'charge' and math.max(0, time - tonumber(ARGV[arg + 5])) or time
  local state, err = rule.read(key, effective_time, tonumber(ARGV[arg + 1]), tonumber(parameters) or parameters)
  if err and find(err.err, 'WRONGTYPE', 1, true) then err = nil end
  local subject, moment = tonumber(ARGV[arg + 4]) or ARGV[arg + 4], tonumber(ARGV[arg + 5])
  if operation == 'credit' and rule.credits_together then
    subject = { { subject, moment } }
    while KEYS[n + 1] == key and ARGV[n * 6 + 5] == operation do
      n = n + 1
      subject[#subject + 1] = { tonumber(ARGV[n * 6]), tonumber(ARGV[n * 6 + 1]) }
    end
  end
  if state and rule[operation] then
    state.settles = true
    err = rule[operation](state, subject, moment)
  end
  failed, n = err or failed, n + 1
end
return failed or 1
