-- leaky_bucket: the rule of leaky_bucket.rs over the string of token_bucket.lua.
--
-- `slack` is what the longest delay is worth beyond whole units, in units of 1 / per: it can be owed and leaves all
-- of the capacity free.

local function line_use(line)
  line.used = bucket_ceil(max(0, line.debt - line.slack), line.per)
end

-- The state of a key, as bucket_read; `beside` is `rate+slack`.
local function line_read(key, time, per, beside)
  local rate, slack = match(beside, '^(%d+)%+(%d+)$')
  local line, err = bucket_read(key, time, per, tonumber(rate))
  if not line then return nil, err end
  line.slack = tonumber(slack)
  line_use(line)
  return line
end

-- When `need` units more of the capacity are free, 1 <= need <= used.
local function line_frees(line, need)
  return bucket_paid(line, (line.used - need) * line.per + line.slack)
end

-- Takes `cost` units, at least 1; an error as bucket_owe.
local function line_charge(line, cost)
  local err = bucket_charge(line, cost)
  if err then return err end
  line_use(line)
  -- It may go when no more than one unit is owed.
  line.delay = bucket_paid(line, line.per) - line.now
end

rules.d = { read = line_read, frees = line_frees, charge = line_charge }

-- only for counting
-- Takes what room there is, up to `cost`; an error as bucket_owe.
local function line_press(line, cost, capacity)
  local err = bucket_press(line, cost, capacity)
  line_use(line)
  return err
end

rules.d.press = line_press
-- end

-- only for amending
-- Gives back what still counts of `units` charged at `at`; an error as bucket_owe.
local function line_credit(line, units, at)
  local err = bucket_credit(line, units, at)
  line_use(line)
  return err
end

rules.d.credit = line_credit
-- end
