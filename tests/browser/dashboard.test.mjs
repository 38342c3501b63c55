// Tests the dashboard of the real binary in Chromium. Screenshots go to `target/browser`.

import assert from 'node:assert/strict';
import { hostname } from 'node:os';
import { after, before, test } from 'node:test';
import { closeBrowser, dashboard, findViolations, openBrowser, Proxy, Redis, shot, startUpstream, TOKEN, until } from './support.mjs';

const POLICIES = `
[[policy]]
name = "login"
match = { methods = ["POST", "GET"], path = "/login" }
key = ["client_ip"]
limit = { requests = 5, per = "1h" }
block_for = "10m"
on_store_failure = "closed"
[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user"]
limits = [{ requests = 20, per = "1h", name = "hourly" }, { requests = 500, per = "1d", algorithm = "token_bucket", burst = 50, name = "daily" }]
[[policy]]
name = "shut"
match = { path = "/internal/**" }
action = "deny"
[[policy]]
name = "free"
match = { path = "/health" }
action = "allow"
priority = 9
[[policy]]
name = "candidate"
mode = "shadow"
match = { path = "/api/**" }
limit = { requests = 30, per = "1h" }
`;

before(openBrowser);
after(closeBrowser);

/** Runs `work` with a proxy and stops the proxy. Fails if a page had script errors. */
async function withProxy(config, work, options) {
  const proxy = await Proxy.start(config, options);
  const pages = [];
  const openPage = async (pageOptions) => { const page = await dashboard(proxy, pageOptions); pages.push(page); return page; };
  try {
    await work(proxy, openPage);
    for (const page of pages) assert.deepEqual(page.faults, []);
  } finally {
    // The page polls: a routed request may be in flight when its context closes.
    await Promise.all(pages.map(async (page) => {
      await page.unrouteAll({ behavior: 'ignoreErrors' });
      await page.context().close();
    }));
    await proxy.end();
  }
}

/** Sends requests that are allowed, rejected, blocked, denied and exempt. */
async function sendMixedTraffic(proxy) {
  for (const [user, times] of [['ann', 60], ['bob', 35], ['cyd', 12]]) await proxy.sendMany(times, `/api/orders/${user}`, { 'x-user': user });
  await proxy.sendMany(9, '/login');
  await proxy.sendMany(4, '/internal/x');
  await proxy.sendMany(15, '/health');
  await until('all decisions to be counted', async () => (await proxy.fetchAdmin('/policies?policy=api')).policies[0].last_hour?.rejected?.some((n) => n > 0));
}

const row = (page, name) => page.locator('#policies tbody tr', { has: page.getByRole('button', { name, exact: true }) });
const shown = (page, text) => page.getByText(text).first().waitFor();

test('an empty dashboard shows instructions, in light and dark mode and on a phone', () => withProxy('', async (proxy, openPage) => {
  const page = await openPage();
  await shown(page, 'No policies are in effect.');
  assert.equal(await page.getByText('No problems.').count(), 0);
  await shown(page, 'No request came in the last');
  await shown(page, 'No policies are configured: every request passes.');
  assert.equal(await page.locator('#policies').isVisible(), false);
  const { labelCount, truncated } = await page.evaluate(() => {
    const { plot } = traffic;
    // The axis moves every second, so its labels occur at every position.
    const labels = Array.from({ length: 10 }, (_, s) => {
      plot.batch(() => plot.setScale('x', { min: 1_800_000_000 + s, max: 1_800_000_120 + s }));
      const [{ _values, _splits }] = plot.axes;
      const written = _values.map((text, n) => ({ text, x: plot.valToPos(_splits[n], 'x'), half: plot.ctx.measureText(text).width / devicePixelRatio / 2 }));
      return written.filter(({ text }) => text);
    }).flat();
    return { labelCount: labels.length, truncated: labels.filter(({ x, half }) => x < half || x > plot.over.clientWidth - half) };
  });
  assert.ok(labelCount > 50, `${labelCount} labels`);
  assert.deepEqual(truncated, [], 'truncated labels');
  await shot(page, 'empty-light');
  await takeAllShots(openPage, 'no-policies', async (shotPage) => shown(shotPage, 'No policies are in effect.'));
}));

const WIDTHS = { wide: { width: 1440, height: 900 }, phone: { width: 390, height: 844 } };

/** Takes pictures in light and dark mode at both widths. Fails on violations that axe-core finds. */
async function takeAllShots(openPage, name, prepare) {
  for (const [width, viewport] of Object.entries(WIDTHS)) {
    for (const dark of [false, true]) {
      const page = await openPage({ dark, viewport });
      await prepare(page);
      assert.deepEqual(await findViolations(page), [], `${name} ${width} ${dark ? 'dark' : 'light'}`);
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), viewport.width);
      await shot(page, `${name}-${width}-${dark ? 'dark' : 'light'}`);
    }
  }
}

test('an app that is down, many refusals and settings that wait for a restart are stated in words', async () => {
  const upstream = await startUpstream();
  upstream.end();
  await withProxy(POLICIES, async (proxy, openPage) => {
    const page = await openHealthyPage(openPage, {});
    assert.deepEqual(await proxy.sendMany(100, '/api/down', { 'x-user': 'ann' }), { 502: 20, 429: 80 });
    await shown(page, 'The upstream fails: 100 % of the forwarded requests of the last minute (20 of 20)');
    await shown(page, '80 % of the requests of the last minute were refused (80 of 100).');
    proxy.write(`[shutdown]\ngrace = "3s"\n${POLICIES}`);
    await shown(page, 'Changed settings wait for a restart.');
    await shown(page, 'shutdown.grace');
    await page.waitForFunction(() => document.getElementById('spoken').textContent.includes('wait for a restart'));
    await takeAllShots(openPage, 'app-down', async (shotPage) => { await shown(shotPage, 'The upstream fails'); await row(shotPage, 'api').waitFor(); });
  }, { upstream });
});

test('200 policies are paged, filtered and sorted over all pages', () => {
  const policies = Array.from({ length: 200 }, (_, n) => `[[policy]]\nname = "policy-${String(n).padStart(3, '0')}"\nmatch = { path = "/p/${n}" }\nlimit = { requests = 5, per = "1h" }\n`);
  return withProxy(policies.join(''), async (proxy, openPage) => {
    await proxy.sendMany(9, '/p/173');
    await proxy.sendMany(4, '/p/120');
    const page = await openHealthyPage(openPage, { viewport: WIDTHS.wide });
    const rows = page.locator('#policies tbody tr');
    const first = () => rows.first().getByRole('button').innerText();
    await shown(page, '1 to 50 of 200');
    assert.equal(await page.getByRole('button', { name: 'Previous' }).isDisabled(), true);
    for (const range of ['51 to 100 of 200', '101 to 150 of 200', '151 to 200 of 200']) {
      await page.getByRole('button', { name: 'Next' }).click();
      await shown(page, range);
    }
    assert.equal(await page.getByRole('button', { name: 'Next' }).isDisabled(), true);
    assert.equal(await first(), 'policy-150');

    await page.getByLabel('Sort by').selectOption('refused');
    await until('policy-173 in the first row', async () => (await first()) === 'policy-173');
    await shown(page, '1 to 50 of 200');
    await page.getByLabel('Sort by').selectOption('requests');
    await until('policy-120 in the second row', async () => (await rows.nth(1).innerText()).startsWith('policy-120'));

    await page.getByLabel('Filter').fill('POLICY-17');
    await shown(page, '10 policies of 200');
    assert.equal(await rows.count(), 10);
    assert.equal(await page.locator('#policies-pages').isVisible(), false);
    await page.getByLabel('Filter').fill('nonsense');
    await shown(page, 'No policy name contains “nonsense”.');
    await page.getByLabel('Filter').fill('');
    await shown(page, '1 to 50 of 200');
    await takeAllShots(openPage, '200-policies', async (shotPage) => { await shown(shotPage, 'No problems.'); await row(shotPage, 'policy-000').waitFor(); });
  });
});

test('warnings of the configuration are counted, listed on demand, and gone with their cause', () => {
  const policy = (more) => `[[policy]]\nname = "only"\nkey = ["client_ip"]\nlimit = { requests = 9, per = "1h" }\n${more}`;
  return withProxy(`include = ["none/*.toml"]\n${policy('match = { methods = ["PSOT"] }\n')}`, async (proxy, openPage) => {
    for (const dark of [false, true]) {
      const page = await openPage({ dark });
      await shown(page, 'The configuration has 2 warnings');
      await shown(page, 'No problems.');
      await page.locator('#config-warnings summary').click();
      const list = await page.locator('#config-warnings-list').innerText();
      assert.match(list, /"none\/\*\.toml" matches no file/);
      assert.match(list, /did you mean "POST"\?/);
      assert.deepEqual(await findViolations(page), []);
      await shot(page, `config-warnings${dark ? '-dark' : ''}`);
    }
    const phone = await openPage({ phone: true });
    await phone.locator('#config-warnings summary').click();
    assert.ok(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await shot(phone, 'config-warnings-phone');
    proxy.write(policy(''));
    await phone.locator('#config-warnings').waitFor({ state: 'hidden' });
  });
});

test('status codes, the host and keys outside ASCII are readable', () => withProxy(POLICIES, async (proxy, openPage) => {
  await proxy.sendMany(25, '/api/caf%C3%A9', { 'x-user': Buffer.from('Jürgen 東京').toString('latin1') });
  await proxy.sendMany(21, '/api/x', { 'x-user': Buffer.from('a\u202eb').toString('latin1') });
  const page = await openHealthyPage(openPage, {});
  const { host } = (await proxy.fetchAdmin('/overview')).instance;
  assert.equal(host, hostname());
  await page.waitForFunction((name) => document.getElementById('instance').textContent.startsWith(`${name}, instance `), host);
  assert.equal(await page.title(), `tidegate on ${host}`);
  await shown(page, '200: 40, 429: 6');
  await page.locator('#keys tbody').getByText('Jürgen%20東京').waitFor();
  await page.locator('#keys tbody').getByText('a%E2%80%AEb').waitFor();
  await page.locator('#paths tbody').getByText('/api/café').waitFor();
  await page.locator('#keys tbody').getByRole('button', { name: 'Jürgen%20東京' }).click();
  await shown(page, 'The next request is refused.');
  await page.locator('#policy code', { hasText: 'Jürgen' }).waitFor();
}));

async function openHealthyPage(openPage, options) {
  const page = await openPage(options);
  await shown(page, 'No problems.');
  return page;
}

test('counts match the traffic, and updates do not shift the layout', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openPage();
  await row(page, 'api').waitFor();
  const cells = await row(page, 'api').locator('td').allInnerTexts();
  assert.deepEqual(cells.slice(2), ['52', '55', '51 %']);
  assert.match(await row(page, 'api').locator('.bar').getAttribute('aria-label'), /^52 allowed, 55 rejected$/);
  assert.match(await row(page, 'candidate').innerText(), /shadow/);
  assert.match(await row(page, 'login').locator('.bar').getAttribute('aria-label'), /5 allowed, .*blocked/);
  const top = page.locator('#keys tbody tr').first();
  assert.deepEqual(await top.locator('th, td').allInnerTexts(), ['ann', 'api', '40']);
  await page.locator('#keys tbody tr', { hasText: 'candidate' }).getByText('shadow').waitFor();
  assert.match(await page.locator('#keys .foot').innerText(), /counts are exact/);
  assert.match(await page.locator('#heat tbody tr', { hasText: 'api' }).innerText(), /55/);
  await page.locator('.chart .uplot[role=img][aria-label*="rejected at most"]').waitFor();

  await page.getByText('As a table').first().click();
  await page.getByRole('columnheader', { name: 'rejected' }).waitFor();
  await page.getByText('As a table').first().click();

  const longer = page.waitForResponse((answer) => answer.url().endsWith('/overview?seconds=600'));
  await page.getByText('10 min').click();
  assert.equal((await longer).status(), 200);
  await page.locator('#pulse[data-state=live]').waitFor();
  assert.match(await page.locator('#traffic .uplot').getAttribute('aria-label'), /rejected at most/);
  await page.getByText('2 min').click();

  await page.evaluate(() => {
    window.shift = 0;
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => { window.shift += entry.value; })).observe({ type: 'layout-shift' });
    window.drawn = 0;
    new MutationObserver(() => { window.drawn += 1; }).observe(document.getElementById('traffic'), { subtree: true, attributes: true });
  });
  await proxy.sendMany(20, '/api/orders/dan', { 'x-user': 'dan' });
  await page.waitForFunction(() => window.drawn > 2);
  assert.ok((await page.evaluate(() => window.shift)) < 0.01, 'the layout shifts');
  await takeAllShots(openPage, 'busy', async (shotPage) => row(shotPage, 'api').waitFor());
  await takeAllShots(openPage, 'heat-all', async (shotPage) => { await shotPage.locator('#heat-what').getByText('All').click(); await shotPage.locator('.heat.requests').waitFor(); });
  await takeAllShots(openPage, 'policy', async (shotPage) => {
    await row(shotPage, 'api').getByRole('button').click();
    await shotPage.locator('#policy').getByRole('button', { name: 'ann', exact: true }).click();
    await shown(shotPage, 'The next request is refused.');
  });
}));

test('on a phone nothing is wider than the screen, and a dialog fills the screen', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openPage({ phone: true });
  await row(page, 'api').waitFor();
  await page.locator('#traffic-legend li').first().waitFor();
  const wide = await page.evaluate(() => [...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll, .unseen, svg, .uplot') && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 90)));
  assert.deepEqual(wide, []);
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 360);
  await shot(page, 'busy-phone');
  await page.getByRole('button', { name: 'api', exact: true }).click();
  await shown(page, 'State of a key');
  await page.locator('#policy .rank tbody tr').first().waitFor();
  assert.deepEqual(await page.locator('#policy').boundingBox(), { x: 0, y: 0, width: 360, height: 740 });
  await shot(page, 'policy-phone');
}));

test('a Redis outage and its end are shown and announced to screen readers', async () => {
  const redis = await Redis.start();
  const config = `${POLICIES}\n[store]\nkind = "redis"\n[store.redis]\nurl = "redis://127.0.0.1:${redis.port}/0"\n`;
  try {
    await withProxy(config, async (proxy, openPage) => {
      await until('the store', async () => (await proxy.fetchAdmin('/overview')).store.up);
      await sendMixedTraffic(proxy);
      const page = await openHealthyPage(openPage, {});
      await redis.kill();
      await proxy.sendMany(30, '/api/orders/ann', { 'x-user': 'eve' });
      // For a second, the instance still knows that Redis refused this key, and answers 429.
      await until('a 503 of the closed policy', async () => await proxy.status('/login') === 503);
      await shown(page, 'The store is unavailable');
      await page.waitForFunction(() => document.getElementById('spoken').textContent.includes('The store is unavailable'));
      await page.waitForFunction(() => document.querySelector('.tile[data-level=bad] .value')?.textContent === 'Down');
      assert.match(await page.locator('#alerts').innerText(), /requests get 503 by login; nothing is limited by/);
      await page.waitForFunction(() => /admitted without the store.*refused without the store/.test(document.querySelector('#traffic .uplot').getAttribute('aria-label')));
      // Requests that a closed policy rejects with 503 count as refused.
      const { policies: [, login] } = await until('the refusals', async () => {
        const response = await proxy.fetchAdmin('/policies');
        return response.policies[1].last_hour?.degraded_refused ? response : undefined;
      });
      const [passed, ...refusals] = ['allowed', 'rejected', 'blocked', 'degraded'].map((id) => (login.last_hour[id] ?? []).reduce((a, b) => a + b, 0));
      await page.waitForFunction(([expectedPassed, expectedRefused]) => {
        const cells = [...document.querySelectorAll('#policies tbody tr')].find((tr) => tr.textContent.startsWith('login')).cells;
        return cells[3].textContent === String(expectedPassed) && cells[4].textContent === String(expectedRefused);
      }, [passed, refusals.reduce((a, b) => a + b)]);
      await takeAllShots(openPage, 'redis-down', async (shotPage) => { await shown(shotPage, 'The store is unavailable'); await row(shotPage, 'api').waitFor(); });
      await row(page, 'api').getByRole('button').click();
      await page.locator('#policy input').first().fill('ann');
      await page.getByRole('button', { name: 'Look up' }).click();
      await shown(page, /Redis gave no answer.* at 127\.0\.0\.1:\d+, for \d+ s; check host and port/);
      await page.keyboard.press('Escape');
      redis.launch();
      await shown(page, /of the last minute were decided without the store, which is up now/);
      await page.waitForFunction(() => document.getElementById('spoken').textContent.includes('Resolved: The store is unavailable'));
    });
  } finally {
    await redis.end();
  }
});

test('the health of Redis is examined on demand', async () => {
  const redis = await Redis.start('--maxmemory-policy', 'allkeys-lru');
  const config = `${POLICIES}\n[store]\nkind = "redis"\n[store.redis]\nurl = "redis://127.0.0.1:${redis.port}/0"\n`;
  try {
    await withProxy(config, async (proxy, openPage) => {
      await until('the store', async () => (await proxy.fetchAdmin('/overview')).store.up);
      await sendMixedTraffic(proxy);
      for (const [name, options] of [['light', {}], ['dark', { dark: true }], ['phone', { phone: true }]]) {
        const page = await openPage(options);
        await page.getByRole('button', { name: 'Examine' }).click();
        await shown(page, 'maxmemory-policy is allkeys-lru');
        assert.match(await page.locator('#doctor').innerText(), /1 fault, 1 warning.*CONFIG SET maxmemory-policy noeviction/s);
        await page.getByText('Memory by policy', { exact: true }).click();
        await page.locator('#doctor tr', { hasText: /^api/ }).waitFor();
        assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), options.phone ? 360 : 1280);
        await page.locator('#doctor').scrollIntoViewIfNeeded();
        await shot(page, `doctor-${name}`);
      }
    });
  } finally {
    await redis.end();
  }
});

test('a rejected reload shows its errors until the configuration is fixed', () => withProxy(POLICIES, async (proxy, openPage) => {
  const page = await openHealthyPage(openPage, {});
  proxy.write(POLICIES.replace('requests = 5,', 'requests = "<img src=x onerror=window.hit=1>",'));
  await shown(page, 'The newest configuration is invalid.');
  assert.match(await page.locator('#alerts pre').innerText(), /policy/);
  await shot(page, 'reload-error');
  proxy.write(POLICIES.replace('requests = 5,', 'requests = 6,'));
  await shown(page, 'No problems.');
  assert.equal(await page.evaluate(() => window.hit), undefined);
}));

test('an instance that stops responding is reported, and its data is marked as stale', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openHealthyPage(openPage, {});
  await row(page, 'api').waitFor();
  proxy.child.kill('SIGKILL');
  await shown(page, 'This instance does not respond.');
  await page.waitForFunction(() => document.getElementById('main').classList.contains('stale'));
  await page.locator('#pulse[data-state=gone]').waitFor();
  await shot(page, 'gone');
}));

test('a policy opens, and a key can be looked up and, with the token, reset', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openHealthyPage(openPage, {});
  await row(page, 'api').getByRole('button').click();
  await shown(page, '/api/**, per header x-user: at most 20 requests in any 1h window');
  await shown(page, /^All policies: \d+ refusals by a limit since/);
  await page.locator('#policy').getByRole('button', { name: 'ann', exact: true }).click();
  await shown(page, 'The next request is refused.');
  assert.match(await page.locator('#policy .answer').innerText(), /20 used\s+0 left/);
  await shot(page, 'policy-light');
  await page.locator('#policy .answer').scrollIntoViewIfNeeded();
  await shot(page, 'policy-key');

  await page.getByRole('button', { name: 'Reset this key…' }).click();
  await page.getByRole('button', { name: 'Cancel', exact: true }).click();
  assert.equal(await proxy.status('/api/x', { 'x-user': 'ann' }), 429, 'nothing is reset before the confirmation');
  await page.getByRole('button', { name: 'Reset this key…' }).click();
  await page.getByRole('button', { name: 'Reset' }).click();
  await page.locator('#token-value').fill(TOKEN);
  await shot(page, 'token');
  await page.getByRole('button', { name: 'Use token' }).click();
  await shown(page, '✓ Reset: hourly, daily.');
  await shown(page, 'The next request passes.');
  assert.equal(await proxy.status('/api/x', { 'x-user': 'ann' }), 200);
  assert.equal(await page.evaluate(() => sessionStorage.length + localStorage.length), 0, 'the token stays in memory only');
  await shot(page, 'policy-reset');
}));

test('a port reachable from other machines serves the page to all, and data only with the token', () => withProxy(POLICIES, async (proxy, openPage) => {
  const page = await openPage();
  await shown(page, 'A token is required');
  assert.equal(await page.locator('main').isVisible(), false);
  await page.locator('#locked-token').fill('wrong');
  await page.keyboard.press('Enter');
  await shown(page, 'The token is invalid.');
  await shot(page, 'locked');
  await page.locator('#locked-token').fill(TOKEN);
  await page.keyboard.press('Enter');
  await row(page, 'api').waitFor();
  assert.equal(await page.locator('#locked').isVisible(), false);
}, { admin: '0.0.0.0:0' }));

test('responses of the instance are shown as text', () => withProxy(POLICIES, async (proxy, openPage) => {
  const hostile = '<img src=x onerror="window.hit=1">\u001b[31m\u202e</script><script>window.hit=1</script>\n" onload="x';
  const seen = await proxy.status('/api/%3Cimg%20src=x%3E', { 'x-user': '<img src=x onerror=window.hit=1>' });
  assert.equal(seen, 200);
  await proxy.sendMany(40, '/api/%3Cimg%20src=x%20onerror=window.hit=1%3E', { 'x-user': '<img src=x onerror=window.hit=1>' });
  // Responses more hostile than any real one: every text in them contains markup.
  const enumFields = new Set(['level', 'mode', 'action', 'on_store_failure', 'kind', 'status', 'algorithm']);
  const poison = (value, name) => {
    if (typeof value === 'string') return enumFields.has(name) ? value : `${value}${hostile}`;
    if (Array.isArray(value)) return value.map((one) => poison(one, name));
    return value && typeof value === 'object' ? Object.fromEntries(Object.entries(value).map(([key, one]) => [key, poison(one, key)])) : value;
  };
  const prepare = (page) => page.route(/\/(overview|policies|top|keys|config|doctor)\b/, async (route) => {
    const url = new URL(route.request().url());
    // The names in the query are poisoned too.
    const cleanParams = [...url.searchParams].map(([name, value]) => [name, value.replaceAll(hostile, '')]);
    const answer = await route.fetch({ url: `${url.origin}${url.pathname}?${new URLSearchParams(cleanParams)}` });
    const json = poison(await answer.json());
    if (json.last_reload) json.last_reload.errors = [hostile];
    await route.fulfill({ response: answer, json });
  });
  for (const page of [await openPage({ prepare }), await openPage()]) {
    await page.locator('#keys tbody tr').first().waitFor();
    await page.getByText('Effective configuration').click();
    await page.getByRole('button', { name: 'Examine' }).click();
    await page.locator('#doctor .findings li').first().waitFor({ state: 'attached' });
    await page.locator('#policies tbody button').first().click();
    await page.locator('#policy .legend').waitFor({ state: 'attached' });
    await page.keyboard.press('Escape');
    await page.locator('#keys tbody button').first().click();
    await page.locator('#policy p').first().waitFor();
    assert.equal(await page.locator('img, body script ~ script[src], [onload], [onerror]').count(), 0);
    assert.equal(await page.evaluate(() => window.hit), undefined);
  }
  await shot(await openHealthyPage(openPage, {}), 'hostile');
}));

test('behind an untrusted ingress, the page shows the required setting', () => withProxy(POLICIES, async (proxy, openPage) => {
  const page = await openHealthyPage(openPage, {});
  await proxy.sendMany(3, '/login', { 'x-forwarded-for': '203.0.113.7' });
  await shown(page, 'An untrusted peer sends forwarding headers');
  assert.match(await page.locator('#alerts pre').innerText(), /\[client\]\ntrusted_proxies = \["127\.0\.0\.1\/32"\]/);
  await shot(page, 'untrusted');
}));

test('all controls are reachable by keyboard, and the focus is visible', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openHealthyPage(openPage, { motion: 'reduce' });
  await row(page, 'api').waitFor();
  const focused = [];
  for (let n = 0; n < 60; n += 1) {
    await page.keyboard.press('Tab');
    const here = await page.evaluate(() => {
      const node = document.activeElement;
      if (node === document.body) return null;
      const style = node.matches('.choice input') ? getComputedStyle(node.nextElementSibling) : getComputedStyle(node);
      return { name: node.getAttribute('aria-label') ?? node.textContent.trim() ?? node.id, outline: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 };
    });
    if (!here) break;
    assert.ok(here.outline, `the focus is not visible on ${here.name}`);
    focused.push(here.name);
  }
  assert.equal(focused[0], 'Skip to content');
  for (const name of ['Pause', 'Token', 'login', 'api', 'candidate', 'ann']) assert.ok(focused.includes(name), `${name} is not reachable: ${focused}`);
  const api = row(page, 'api').getByRole('button');
  await api.focus();
  await page.keyboard.press('Enter');
  await page.locator('#policy[open]').waitFor();
  await page.locator('#policy .rank').waitFor();
  await page.keyboard.press('Escape');
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'api');
  const moving = await page.evaluate(() => document.getAnimations().length);
  assert.equal(moving, 0, 'no animation with prefers-reduced-motion');
}));

test('the page has landmarks, accessible names and tables', () => withProxy(POLICIES, async (proxy, openPage) => {
  await sendMixedTraffic(proxy);
  const page = await openHealthyPage(openPage, {});
  await row(page, 'api').waitFor();
  for (const name of ['Problems', 'Now', 'Requests by decision', 'Policies', 'Keys refused most', 'The last day, by hour', 'Store and fleet']) {
    await page.getByRole('region', { name, exact: true }).waitFor();
  }
  assert.equal(await page.getByRole('main').count(), 1);
  const nameless = await page.evaluate(() => [...document.querySelectorAll('button, input, select, [role=img], [role=region]')].filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length)).map((node) => node.outerHTML));
  assert.deepEqual(nameless, []);
  assert.equal(await page.locator('th:not([scope])').count(), 0);
}));
