-- The start of a plain program: admits a request with up to four ordinary limits in straight code,
-- without functions and with few tables, both of which Redis would create on each call. A `break`
-- leaves the request, unchanged, to the general program, which follows: a refusal, or a rare state.
--
-- The sections `plain check` of the charges follow in their order, then their sections `plain
-- charge`, then the reply, as in decide.lua. In these sections, `_N` becomes `_1`, `_2` .. and
-- KEY, COST, CAPACITY, PER, PARAMETER and SLACK become the elements of KEYS and ARGV.
--
-- ARGV[1]  the time in us, for tests; empty: the server's TIME
-- ARGV     then per charge: cost, capacity, period in us, and the parameters of the algorithm
local call, try, format, now, delay = redis.call, redis.pcall, string.format, ARGV[1], 0
if now == '' then
  now = call('TIME')
  now = now[1] * 1000000 + now[2]
else
  now = now + 0
end
