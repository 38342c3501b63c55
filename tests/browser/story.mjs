// Some minutes of a service's life, told by its dashboard: users of all kinds, a scraper, somebody who guesses
// passwords, a configuration that is wrong, and Redis away in the middle. Ends with a picture of what is seen then.
//
//   STORY_MINUTES=10 node tests/browser/story.mjs
//
// Ten minutes are the whole story: all times below are parts of it.

import http from 'node:http';
import { closeBrowser, dashboard, openBrowser, Proxy, Redis, shot, shots, until } from './support.mjs';

const minutes = Number(process.env.STORY_MINUTES ?? 10);
const whole_ms = minutes * 60_000;
const begun = Date.now();
const now = () => (Date.now() - begun) / whole_ms;
const say = (what) => console.log(`${String(Math.round(now() * 100)).padStart(3)} %  ${what}`);

const redis = await Redis.start();
const policies = (login) => `
[[policy]]
name = "login"
match = { path = "/login" }
key = ["header:x-forwarded-for"]
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
`;
const proxy = await Proxy.start(policies(5));
const agent = new http.Agent({ keepAlive: true, maxSockets: 64 });

function send(target, headers) {
  const request = http.get(proxy.url + target, { headers, agent }, (response) => response.resume());
  request.on('error', () => {});
}

/** Calls `act` at random moments, `rate(now())` times a second on average. */
const people = [];
function often(rate, act) {
  people.push(setInterval(() => {
    const due = rate(now()) / 20;
    for (let n = Math.floor(due) + (Math.random() < due % 1 ? 1 : 0); n > 0; n -= 1) act();
  }, 50));
}
const some = (list) => list[Math.floor(Math.random() * list.length)];
const during = (from, to, rate) => (part) => (part >= from && part < to ? rate : 0);
const users = ['ann', 'bob', 'cyd', 'dan', 'eve', 'fay', 'gus', 'hal', 'ida', 'jon'];

often((part) => 18 + 10 * Math.sin(part * 9), () => send(`/api/${some(['orders', 'items', 'prices'])}`, { 'x-user': some(users) }));
often(() => 25, () => send('/api/feed', { 'x-user': 'acme' }));
often(() => 6, () => send('/search?q=tide', {}));
often(during(0.1, 0.4, 30), () => send(`/api/items/${Math.floor(Math.random() * 1000)}`, { 'x-user': 'scraper' }));
often(during(0.25, 0.9, 1.5), () => send('/login', { 'x-forwarded-for': '203.0.113.66' }));
often(() => 0.4, () => send('/login', { 'x-forwarded-for': `198.51.100.${Math.floor(Math.random() * 250)}` }));
often(during(0.7, 0.8, 40), () => send('/search?q=flash+sale', {}));
often(() => 0.2, () => send('/internal/metrics', {}));

/** What happens, at which part of the story. */
const chapters = [
  [0.1, 'a scraper begins: more than 8 a second', () => {}],
  [0.25, 'somebody guesses passwords', () => {}],
  [0.4, 'the scraper gives up', () => {}],
  [0.45, 'Redis dies', () => redis.kill()],
  [0.5, 'a picture of the outage', (page) => shot(page, 'story-outage')],
  [0.55, 'Redis is back', () => redis.begin()],
  [0.62, 'a configuration that is wrong', () => proxy.write(policies('"many"'))],
  [0.68, 'it is mended', () => proxy.write(policies(6))],
  [0.7, 'a flash sale: everybody searches', () => {}],
  [0.8, 'it is over', () => {}],
  [0.92, 'the end', () => {}],
];

await until('Redis', async () => (await proxy.asks('/overview')).store.up);
await openBrowser();
const page = await dashboard(proxy);
try {
  await page.getByText('10 min').click();
  for (const [part, what, act] of chapters) {
    await new Promise((done) => setTimeout(done, Math.max(0, part * whole_ms - (Date.now() - begun))));
    say(what);
    await act(page);
  }
  await page.getByText('All is well.').first().waitFor();
  await shot(page, 'story');
  // What docs/img/dashboard.png is: all but the last parts.
  const { y, height } = await page.locator('section', { has: page.locator('#heat') }).boundingBox();
  await page.screenshot({ path: `${shots}/dashboard.png`, fullPage: true, clip: { x: 0, y: 0, width: 1280, height: y + height + 12 } });
  const { policies: told } = await proxy.asks('/policies');
  for (const { name, allowed, rejected, blocked, degraded, shadow_rejected } of told) say(JSON.stringify({ name, allowed, rejected, blocked, degraded, shadow_rejected }));
  say(`pictures: story.png, story-outage.png and dashboard.png in ${shots}`);
} finally {
  people.forEach(clearInterval);
  agent.destroy();
  await closeBrowser();
  await proxy.end();
  await redis.end();
}
