-- block: the rule of block.rs over one string: the time in us at which the block ends.

-- Returns the state of a key at `time`; nil and perhaps an error if the value is foreign.
local function block_read(key, time, per)
  local value = try('GET', key)
  local ends_at = 0
  if value then
    if type(value) == 'table' then return nil, value end
    ends_at = tonumber(match(value, '^%d+$'))
    if not ends_at or ends_at > 9007199254740992 then return nil end
  end
  return { key = key, now = time, per = per, ends_at = ends_at, used_units = ends_at > time and 1 or 0 }
end

local function block_release_time(block)
  return block.ends_at
end

-- Starts the block. Returns an error if Redis rejects the write; then nothing was written.
local function block_charge(block)
  block.ends_at, block.used_units = block.now + block.per, 1
  local reply = try('SET', block.key, integer(block.ends_at), 'PXAT', integer(math.ceil(block.ends_at / 1000)))
  if reply.err then return reply end
end

rules.b = { read = block_read, release_time = block_release_time, charge = block_charge, is_block = true }
