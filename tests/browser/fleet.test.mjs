// Tests the fleet section of the dashboard in Chromium, with three instances. Screenshots go to `target/browser`.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { closeBrowser, dashboard, openBrowser, Proxy, Redis, shot, until } from './support.mjs';

before(openBrowser);
after(closeBrowser);

test('the fleet section lists all instances and adds up what they refused', async () => {
  const redis = await Redis.start();
  const config = `[store]
kind = "redis"
[store.redis]
url = "redis://127.0.0.1:${redis.port}/0"
key_prefix = "orders"
[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user"]
limit = { requests = 5, per = "1h" }
`;
  const proxies = [];
  const pages = [];
  try {
    for (const name of ['orders-7f9c-a', 'orders-7f9c-b', 'orders-7f9c-c']) proxies.push(await Proxy.start(config, { env: { POD_NAME: name } }));
    for (const [index, proxy] of proxies.entries()) {
      await proxy.sendMany(10 + 5 * index, '/api/orders', { 'x-user': 'ann' });
      await proxy.sendMany(8, `/api/items/${index}`, { 'x-user': 'bob' });
    }
    await until('all answers', async () => (await proxies[0].fetchAdmin('/fleet')).keys.refused === 59);
    for (const options of [{}, { dark: true }, { phone: true }, { dark: true, phone: true }]) {
      const page = await dashboard(proxies[0], { ...options, prepare: (page) => page.addInitScript((token) => sessionStorage.setItem('tidegate.token', token), 's3cret') });
      pages.push(page);
      await page.getByText('3 instances').first().waitFor();
      for (const name of ['orders-7f9c-a', 'orders-7f9c-b', 'orders-7f9c-c']) await page.locator('#fleet tbody tr', { hasText: name }).waitFor();
      assert.equal(await page.locator('#fleet tbody tr', { hasText: 'this page' }).count(), 1);
      await page.locator('#fleet-keys tbody tr', { hasText: 'ann' }).getByText('40', { exact: true }).waitFor();
      await page.locator('#fleet-keys tbody tr', { hasText: 'bob' }).getByText('19', { exact: true }).waitFor();
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth > document.documentElement.clientWidth), false, 'the page scrolls sideways');
      await shot(page, ['fleet', options.dark && 'dark', options.phone && 'phone'].filter(Boolean).join('-'));
    }
    await proxies[2].end();
    // The page asks every 5 s, the answer may be 1 s old, and the list drops an instance 4 s after its last heartbeat.
    await until('an instance without an answer', async () => (await proxies[0].fetchAdmin('/fleet')).instances.some((instance) => instance.not_asked));
    await pages[0].reload();
    await pages[0].getByText('did not answer').waitFor();
    await pages[0].getByText(/No answer: its admin port failed/).waitFor();
    await shot(pages[0], 'fleet-not-asked');
    for (const page of pages) assert.deepEqual(page.faults, []);
  } finally {
    await Promise.all(pages.map((page) => page.context().close()));
    await Promise.all(proxies.slice(0, 2).map((proxy) => proxy.end()));
    await redis.end();
  }
});
