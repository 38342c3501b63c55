// Generates the dashboard screenshots of the documentation. Simulates a service with normal users, a
// scraper, password guessing, an invalid configuration and a Redis outage.
//
//   STORY_MINUTES=10 node tests/browser/story.mjs
//
// STORY_MINUTES is the length of the simulation. All times below are fractions of it.

import http from 'node:http';
import { closeBrowser, dashboard, openBrowser, Proxy, Redis, shot, shots, until } from './support.mjs';

const minutes = Number(process.env.STORY_MINUTES ?? 10);
const whole_ms = minutes * 60_000;
const startedAt = Date.now();
const now = () => (Date.now() - startedAt) / whole_ms;
const log = (message) => console.log(`${String(Math.round(now() * 100)).padStart(3)} %  ${message}`);

const redis = await Redis.start();
const policies = (login) => `
[client]
trusted_proxies = ["127.0.0.1"]
trusted_headers = ["x-user"]
[[policy]]
name = "login"
match = { path = "/login" }
key = ["client_ip"]
limit = { requests = ${login}, per = "1m" }
block_for = "30s"
on_store_failure = "closed"
[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user"]
limits = [{ requests = 8, per = "1s", name = "second" }, { requests = 200, per = "1m", name = "minute" }]
on_store_failure = "local"
[[policy.override]]
key = ["acme"]
limit = { requests = 60, per = "1s" }
[[policy]]
name = "search"
match = { path = "/search" }
limit = { requests = 12, per = "1s", algorithm = "token_bucket", burst = 20 }
[[policy]]
name = "internal"
match = { path = "/internal/**" }
action = "deny"
[[policy]]
name = "candidate"
mode = "shadow"
match = { path = "/api/**" }
key = ["header:x-user"]
limit = { requests = 60, per = "1m" }
[store]
kind = "redis"
[store.redis]
url = "redis://127.0.0.1:${redis.port}/0"
key_prefix = "shop"
instances = 1
# A busy machine is not part of the story.
timeout = "500ms"
`;
const proxy = await Proxy.start(policies(5));
const agent = new http.Agent({ keepAlive: true, maxSockets: 64 });

function send(target, headers) {
  const request = http.get(proxy.url + target, { headers, agent }, (response) => response.resume());
  request.on('error', () => {});
}

/** Calls `act` at random times, `rate(now())` times per second on average. */
const timers = [];
function schedule(rate, act) {
  timers.push(setInterval(() => {
    const due = rate(now()) / 20;
    for (let n = Math.floor(due) + (Math.random() < due % 1 ? 1 : 0); n > 0; n -= 1) act();
  }, 50));
}
const pickRandom = (list) => list[Math.floor(Math.random() * list.length)];
const during = (from, to, rate) => (part) => (part >= from && part < to ? rate : 0);
const users = ['ann', 'bob', 'cyd', 'dan', 'eve', 'fay', 'gus', 'hal', 'ida', 'jon'];

schedule((part) => 18 + 10 * Math.sin(part * 9), () => send(`/api/${pickRandom(['orders', 'items', 'prices'])}`, { 'x-user': pickRandom(users) }));
schedule(() => 25, () => send('/api/feed', { 'x-user': 'acme' }));
schedule(() => 6, () => send('/search?q=tide', {}));
schedule(during(0.1, 0.4, 30), () => send(`/api/items/${Math.floor(Math.random() * 1000)}`, { 'x-user': 'scraper' }));
schedule(during(0.25, 0.9, 1.5), () => send('/login', { 'x-forwarded-for': '203.0.113.66' }));
schedule(() => 0.4, () => send('/login', { 'x-forwarded-for': `198.51.100.${Math.floor(Math.random() * 250)}` }));
schedule(during(0.7, 0.8, 40), () => send('/search?q=flash+sale', {}));
schedule(() => 0.2, () => send('/internal/metrics', {}));

/** Events and their times as fractions of the simulation. */
const events = [
  [0.1, 'a scraper starts, with more than 8 requests per second', () => {}],
  [0.25, 'password guessing starts', () => {}],
  [0.4, 'the scraper stops', () => {}],
  [0.45, 'Redis is killed', () => redis.kill()],
  [0.5, 'screenshot of the outage', (page) => shot(page, 'story-outage')],
  [0.55, 'Redis restarts', () => redis.launch()],
  [0.62, 'an invalid configuration is written', () => proxy.write(policies('"many"'))],
  [0.68, 'the configuration is fixed', () => proxy.write(policies(6))],
  [0.7, 'a flash sale starts: many searches', () => {}],
  [0.8, 'the flash sale ends', () => {}],
  [0.92, 'the simulation ends', () => {}],
];

await until('Redis', async () => (await proxy.fetchAdmin('/overview')).store.up);
await openBrowser();
const page = await dashboard(proxy);
try {
  await page.getByText('10 min').click();
  for (const [part, what, act] of events) {
    await new Promise((done) => setTimeout(done, Math.max(0, part * whole_ms - (Date.now() - startedAt))));
    log(what);
    await act(page);
  }
  await page.getByText('No problems.').first().waitFor();
  await shot(page, 'story');
  // docs/img/dashboard.png: everything above the section of the fleet.
  const { y } = await page.locator('#fleet-card').boundingBox();
  await page.screenshot({ path: `${shots}/dashboard.png`, fullPage: true, clip: { x: 0, y: 0, width: 1280, height: y } });
  const { policies: totals } = await proxy.fetchAdmin('/policies');
  for (const { name, allowed, rejected, blocked, degraded, shadow_rejected } of totals) log(JSON.stringify({ name, allowed, rejected, blocked, degraded, shadow_rejected }));
  log(`screenshots: story.png, story-outage.png and dashboard.png in ${shots}`);
} finally {
  timers.forEach(clearInterval);
  agent.destroy();
  await closeBrowser();
  await proxy.end();
  await redis.end();
}
