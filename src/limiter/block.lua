-- block: the rule of block.rs over one string, the time at which it ends.

-- The state of a key at `time`; nil and perhaps an error if it isn't ours.
local function block_read(key, time, per)
  local value = try('GET', key)
  local ends = 0
  if value then
    if type(value) == 'table' then return nil, value end
    ends = tonumber(match(value, '^%d+$'))
    if not ends or ends > 9007199254740992 then return nil end
  end
  return { key = key, now = time, per = per, ends = ends, used = ends > time and 1 or 0 }
end

local function block_frees(block)
  return block.ends
end

-- Begins; an error if Redis doesn't let us write, and then nothing was written.
local function block_charge(block)
  block.ends, block.used = block.now + block.per, 1
  local reply = try('SET', block.key, integer(block.ends), 'PXAT', integer(math.ceil(block.ends / 1000)))
  if reply.err then return reply end
end

rules.b = { read = block_read, frees = block_frees, charge = block_charge, blocks = true }
