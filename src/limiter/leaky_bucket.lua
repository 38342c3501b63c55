-- leaky_bucket: the rule of leaky_bucket.rs over the string of token_bucket.lua.
--
-- `slack` is the part of the longest delay beyond whole units, in units of 1 / per. A debt of up to
-- `slack` leaves the whole capacity free.

-- Returns the state of a key, as bucket_read; `parameters` is `rate+slack`.
local function queue_read(key, time, per, parameters)
  local rate, slack = match(parameters, '^(%d+)%+(%d+)$')
  local queue, err = bucket_read(key, time, per, tonumber(rate))
  if not queue then return nil, err end
  queue.slack = tonumber(slack)
  bucket_update_used_units(queue)
  return queue
end

-- Takes `cost` units, at least 1. Errors as bucket_set_debt.
local function queue_charge(queue, cost)
  local err = bucket_charge(queue, cost)
  if err then return err end
  if queue.settles then queue.charged_at = bucket_debt_drop_time(queue, 0) end
  -- The request may leave when the debt is at most one unit.
  queue.delay = bucket_debt_drop_time(queue, queue.per) - queue.now
end

rules.d = { read = queue_read, release_time = bucket_release_time, charge = queue_charge }

-- section: rejected charges
rules.d.charge_rejected = bucket_charge_rejected
-- end section

-- section: settlements
-- Returns `units` of a request that does not leave, if its last position, which ends at
-- `charged_at`, is the last of the queue: all others are promised. Errors as bucket_set_debt.
local function queue_credit(queue, units, charged_at)
  if bucket_debt_drop_time(queue, 0) ~= charged_at then return end
  local returned = min(queue.debt, units * queue.per)
  queue.stored_debt, queue.debt = queue.stored_debt - returned, queue.debt - returned
  bucket_update_used_units(queue)
  return bucket_write(queue)
end

rules.d.credit = queue_credit
-- end section
