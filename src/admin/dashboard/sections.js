'use strict';
// The parts of the page, each drawn anew from what the instance told last.

const ICONS = { good: 'M4 11l4 4 8-9', warn: 'M10 3l8 14H2zM10 8v4M10 14.5v.1', bad: 'M7 2h6l5 5v6l-5 5H7l-5-5V7zM7.5 7.5l5 5M12.5 7.5l-5 5' };
const LEVELS = { good: 'Good', warn: 'Warning', bad: 'Trouble' };

/** What somebody should look at. `id` stays the same while it lasts; `more` are nodes below the sentence. */
function alertsOf({ overview, policies, gone }) {
  const alerts = [];
  const add = (id, level, title, text, ...more) => alerts.push({ id, level, title, text, more });
  if (gone) {
    add('gone', 'bad', gone.silent ? 'This instance doesn’t answer.' : 'This instance answers with an error.', `${gone.why}. What you see is as of ${overview ? at(gone.since_s) : 'never'}; it is asked again until it answers.`);
  }
  if (!overview) return alerts;
  const { store, status, last_reload, hints } = overview;
  const told = new Set();
  const hint = (words) => hints.filter((text) => text.includes(words)).map((text) => (told.add(text), text))[0];
  if (status !== 'ready') {
    add('phase', 'warn', `This instance is ${status}.`, status === 'stopping' ? 'It ends in good order: readiness fails, what is in flight goes on.' : 'Clients can’t connect yet.');
  }
  if (hint('store is away') || !store.up) {
    const by = (what) => (policies?.policies ?? []).filter((policy) => policy.on_store_failure === what).length;
    const says = [['open', 'let requests through'], ['local', 'go on with this instance’s share'], ['closed', 'refuse']];
    const does = says.filter(([what]) => by(what)).map(([what, words]) => `${by(what)} ${words}`).join(', ');
    const breaker = store.breaker_open ? ' The breaker is open: no request waits for it, a probe in the background finds it again.' : '';
    const errors = Object.entries(store.errors).filter(([, n]) => n > 0).map(([kind, n]) => `${kind} ${count(n)}`).join(', ');
    add('store', 'bad', `The store is away (${store.address || store.kind}).`, `${does ? `Of the policies ${does}.` : 'Policies decide by on_store_failure.'}${breaker}${errors ? ` Errors so far: ${errors}.` : ''}`);
  } else if (store.breaker_open) {
    add('store', 'bad', 'The breaker is open.', 'The store answers, and has to prove itself before requests ask it again.');
  }
  if (last_reload.errors.length || hint('configuration is wrong')) {
    hint('configuration is wrong');
    add('reload', 'bad', 'The newest configuration is wrong.', `Generation ${overview.generation}, the last good one, stays in effect. What is wrong:`, h('pre', {}, last_reload.errors.join('\n')));
  }
  if (hint('trusted_proxies')) {
    const peers = overview.untrusted_peers;
    const nets = peers.map((peer) => `"${peer}${peer.includes(':') ? '/128' : '/32'}"`).join(', ');
    add('trust', 'warn', 'Somebody in front of tidegate names clients, and isn’t trusted.',
      `${many(overview.untrusted_forwarding, 'request')} came with a forwarding header from ${peers.join(', ') || 'a peer'}, outside client.trusted_proxies: the header is not believed. If that is your ingress, everybody behind it shares one quota until you list it, or the network that its addresses are from:`,
      h('pre', {}, `[client]\ntrusted_proxies = [${nets}]`));
  }
  const now = overview.last_reload.at_s && Date.now() / 1000;
  for (const { file, ends_s } of overview.certificates) {
    if (ends_s < now + 14 * 86400) add(`cert ${file}`, ends_s < now ? 'bad' : 'warn', ends_s < now ? 'A certificate has expired.' : 'A certificate ends soon.', `${file}: ${dated.format(ends_s * 1000)}.`);
  }
  if (overview.connections.open >= overview.connections.max) add('full', 'warn', 'There is no room for more connections.', `All ${whole.format(overview.connections.max)} are taken: new ones wait. See listen.max_connections.`);
  for (const text of hints) if (!told.has(text)) add(text, 'warn', 'Worth a look.', text);
  return alerts;
}

function drawAlerts(state) {
  const alerts = alertsOf(state);
  const calm = { id: 'calm', level: 'good', title: 'All is well.', text: 'The store answers, the newest configuration is in effect.', more: [] };
  const shown = alerts.length || !state.overview ? alerts : [calm];
  keyed($('alerts'), shown, ({ id }) => id, ({ level }) => {
    const icon = svg('svg', { class: 'icon', viewBox: '0 0 20 20', role: 'img', 'aria-label': LEVELS[level] }, svg('path', { d: ICONS[level] }));
    return h('div', { class: 'alert', 'data-level': level }, icon, h('div', {}));
  }, (node, { level, title, text, more }) => {
    const written = [level, title, text, ...more.map((part) => part.textContent)].join('\n');
    if (node.written === written) return;
    node.written = written;
    fill(node.lastChild, h('p', {}, h('strong', {}, title), ` ${text}`), more);
  });
  announce(alerts);
}

let spoken = new Map();
/** Says aloud what is new and what is over, once. */
function announce(alerts) {
  const now = new Map(alerts.map(({ id, title }) => [id, title]));
  const news = [...now].filter(([id]) => !spoken.has(id)).map(([, title]) => title);
  const over = [...spoken].filter(([id]) => !now.has(id)).map(([, title]) => `Over: ${title}`);
  if (news.length || over.length) say($('spoken'), [...news, ...over].join(' '));
  spoken = now;
}

function drawTiles({ overview }) {
  const { seconds } = overview.requests;
  const words = ['allowed', 'delayed', 'rejected', 'blocked', 'denied', 'degraded', 'malformed'];
  const last = (id, n) => sum(seconds[id].slice(-1 - n, -1));
  const span = Math.min(60, Math.max(1, seconds.at.length - 1));
  const all = words.reduce((n, id) => n + last(id, span), 0);
  const now = words.reduce((n, id) => n + last(id, 5), 0) / Math.min(5, span);
  const refused = REFUSED.reduce((n, id) => n + last(id, span), 0);
  const degraded = last('degraded', span);
  const { store, latency, connections, http } = overview;
  const asked = Object.entries(latency.decisions).sort(([, a], [, b]) => b.count - a.count)[0];
  const failed = Object.values(http.upstream_errors).reduce((n, m) => n + m, 0);
  const tiles = [
    ['Requests per second', rate(now), '', `${many(all, 'request')} in ${lasting(span)}`],
    ['Refused', share(refused, all), '', `${count(refused)} in ${lasting(span)}`],
    ['Decided without the store', share(degraded, all), '', `${count(degraded)} in ${lasting(span)}`, degraded ? 'warn' : ''],
    ['Store', store.up ? (store.breaker_open ? 'Breaker open' : 'Up') : 'Away', '', store.kind === 'memory' ? 'in memory' : store.address, store.up && !store.breaker_open ? '' : 'bad'],
    ['Half of decisions within', asked ? took(asked[1].p50_s) : '–', '', asked ? `99 % within ${took(asked[1].p99_s)}` : `none in ${lasting(span)}`],
    ['Connections', count(connections.open), ` of ${count(connections.max)}`, failed ? many(failed, 'upstream error') : 'no upstream error'],
  ];
  keyed($('tiles'), tiles, ([title]) => title, ([title]) => h('div', { class: 'tile' }, h('h2', {}, title), h('p', { class: 'value' }), h('p', { class: 'more' })), (node, [, value, small, more, level]) => {
    if (node.children[1].textContent !== value + small) fill(node.children[1], value, small && h('small', {}, small));
    say(node.children[2], more);
    node.children[2].title = more;
    node.dataset.level = level ?? '';
  });
}

const traffic = new Stack($('traffic'), (shown, columns) => `Requests by decision over time. ${shown.map(({ id, word }) => `${word} at most ${rate(Math.max(...columns[id]))} a second`).join(', ') || 'None'}. The table below has the numbers.`, rate);

function drawTraffic({ overview }, span_s) {
  const { seconds } = overview.requests;
  const step = span_s > 120 ? 5 : 1;
  const first = Math.ceil((seconds.at[seconds.at.length - 1] - span_s) / step) * step;
  const times = Array.from({ length: Math.floor(span_s / step) }, (_, n) => first + n * step);
  const shown = DECISIONS.filter(({ id }) => seconds[id]);
  const columns = Object.fromEntries(shown.map(({ id }) => [id, times.map(() => 0)]));
  // The last second is not over yet.
  seconds.at.slice(0, -1).forEach((s, from) => {
    const to = Math.floor((s - first) / step);
    if (to >= 0 && to < times.length) for (const { id } of shown) columns[id][to] += seconds[id][from] / step;
  });
  traffic.set(times, step, columns, `No request came in the last ${lasting(span_s)}.`);
  const last = (id) => sum(seconds[id].slice(-6, -1)) / Math.min(5, Math.max(1, seconds.at.length - 1));
  keyed($('traffic-legend'), shown, ({ id }) => id, ({ id, word }) => h('li', {}, swatch(id), word, h('span', { class: 'n' })), (node, { id }) => {
    const now = last(id);
    say(node.lastChild, `${rate(now)}/s`);
    node.classList.toggle('none', now === 0);
  });
  if ($('traffic-table').closest('details').open) fill($('traffic-table'), asTable('Requests per second, by decision', times, columns, rate));
}

function badges(policy) {
  const badge = (word, level) => h('span', { class: `badge ${level ?? ''}` }, word);
  return [policy.mode === 'shadow' && badge('shadow'), policy.mode === 'off' && badge('off'), policy.action === 'deny' && badge('deny'), policy.action === 'allow' && badge('exempt')].filter(Boolean);
}

/** Sums of a policy's series, by decision. */
const sumsOf = (series) => Object.fromEntries(Object.entries(series ?? {}).map(([id, column]) => [id, sum(column)]));

/** What a policy refused, or would have. */
const turnedAway = (counts) => refusedOf(counts) + (counts.shadow_rejected ?? 0);

function byMinute(policy, minutes) {
  const series = policy.last_hour ?? {};
  const total = (ids) => minutes.map((_, n) => ids.reduce((all, id) => all + (series[id]?.[n] ?? 0), 0));
  return [total(DECISIONS.map(({ id }) => id)), total([...REFUSED, 'shadow_rejected'])];
}

function drawPolicies({ policies }, sort, open) {
  const rows = policies.policies.map((policy) => ({ policy, counts: sumsOf(policy.last_hour) }));
  const orders = { refused: (a, b) => turnedAway(b.counts) - turnedAway(a.counts), requests: (a, b) => allOf(b.counts) - allOf(a.counts), name: (a, b) => a.policy.name.localeCompare(b.policy.name) };
  if (orders[sort]) rows.sort(orders[sort]);
  const none = policies.total === 0;
  $('policies').hidden = none;
  $('policies-empty').hidden = !none;
  if (none && !$('policies-empty').firstChild) {
    fill($('policies-empty'), h('p', {}, 'There is no policy: every request passes. One to begin with, for config.toml:'),
      h('pre', {}, '[[policy]]\nname = "per-client"\nkey = ["client_ip"]\nlimit = { requests = 100, per = "1m" }\nmode = "shadow"  # only counts; remove to enforce'));
  }
  say($('policies-count'), none ? '' : many(policies.total, 'policy', 'policies'));
  keyed($('policies').tBodies[0], rows, ({ policy }) => policy.name, ({ policy }) => {
    const name = h('button', { type: 'button', class: 'name', onclick: () => open(policy.name) }, policy.name);
    const bar = h('div', { class: 'bar', role: 'img' });
    return h('tr', {}, h('th', { scope: 'row' }, name, h('span', {})), h('td', { class: 'wide' }, bar), h('td', {}, spark()), h('td', { class: 'num wide' }), h('td', { class: 'num' }), h('td', { class: 'num' }));
  }, (row, { policy, counts }) => {
    const [name, bar, line, passed, refused, part] = row.children;
    const kind = `${policy.mode} ${policy.action}`;
    if (name.lastChild.dataset.kind !== kind) { name.lastChild.dataset.kind = kind; fill(name.lastChild, badges(policy)); }
    drawBar(bar.firstChild, counts);
    drawSpark(line.firstChild, ...byMinute(policy, policies.minutes));
    const away = turnedAway(counts);
    say(passed, count(allOf(counts) - away));
    say(refused, count(away));
    say(part, share(away, allOf(counts)));
    refused.title = policy.mode === 'shadow' ? 'would have been refused' : '';
    for (const cell of [refused, part]) cell.classList.toggle('zero', away === 0);
  });
}

/** A ranking with what is known of its errors: each count is exact, or too high by at most its error. `shadows` are the names of policies that refuse nobody yet. */
function drawRanking(host, ranking, what, empty, shadows, open) {
  if (ranking.entries.length === 0) {
    fill(host, h('p', { class: 'empty' }, empty));
    host.table = undefined;
    return;
  }
  if (!host.table) {
    const title = what === 'key' ? 'Key' : 'Path';
    host.table = h('table', { class: 'rank' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, title), h('th', { scope: 'col' }, 'Policy'), h('th', { scope: 'col', class: 'num' }, 'Refused'))), h('tbody', {}));
    fill(host, host.table, h('p', { class: 'foot' }));
  }
  const most = ranking.entries[0].count;
  keyed(host.table.tBodies[0], ranking.entries, (entry) => `${entry.policy}\n${entry[what]}`, (entry) => {
    const shown = what === 'key' ? keyWords(entry.key) : entry.path;
    const cell = what === 'key' ? h('button', { type: 'button', class: 'name mono', onclick: () => open(entry.policy, entry.key) }, shown) : h('span', { class: 'mono wrap' }, shown);
    return h('tr', {}, h('th', { scope: 'row', class: 'wrap' }, cell), h('td', { class: 'wrap' }, entry.policy, ' ', h('span', { class: 'badge', hidden: true }, 'shadow')), h('td', { class: 'num' }, h('span', { class: 'n' }, h('i', {}), h('b', {}))));
  }, (row, entry) => {
    const [bar, n] = row.lastChild.firstChild.children;
    bar.style.width = `${(100 * entry.count) / most}%`;
    row.children[1].lastChild.hidden = !shadows.has(entry.policy);
    say(n, entry.error ? `${count(entry.count - entry.error)}–${count(entry.count)}` : count(entry.count));
    row.lastChild.title = entry.error ? `between ${whole.format(entry.count - entry.error)} and ${whole.format(entry.count)}` : `exactly ${whole.format(entry.count)}`;
  });
  const rest = ranking.unseen_at_most ? ` Who is not kept was refused ${many(ranking.unseen_at_most, 'time')} at most.` : ' Nobody is left out: counts are exact.';
  say(host.lastChild, `${many(ranking.refused, 'refusal')} of all policies since ${ranking.since_s ? hour.format(ranking.since_s * 1000) : 'the start'}.${rest}`);
}

/** Policies by hours. The number stands in every cell: shade is only for the eye that skims. */
function drawHeat({ policies }, what) {
  const { hours } = policies;
  const ids = what === 'requests' ? DECISIONS.map(({ id }) => id) : [...REFUSED, 'shadow_rejected'];
  const of = (policy, n) => ids.reduce((all, id) => all + (policy.last_day?.[id]?.[n] ?? 0), 0);
  const rows = policies.policies.map((policy) => ({ policy, cells: hours.map((_, n) => of(policy, n)) })).filter(({ cells }) => sum(cells) > 0);
  rows.sort((a, b) => sum(b.cells) - sum(a.cells));
  const host = $('heat');
  const drawn = JSON.stringify([what, hours, rows.slice(0, 12).map(({ policy, cells }) => [policy.name, cells])]);
  if (host.drawn === drawn) return;
  host.drawn = drawn;
  if (rows.length === 0) {
    fill(host, h('p', { class: 'empty' }, what === 'requests' ? 'No policy decided anything in the last day.' : 'Nobody was refused in the last day.'));
    return;
  }
  const most = Math.max(...rows.flatMap(({ cells }) => cells));
  const cell = (n) => {
    const shade = h('i', {});
    shade.style.opacity = n ? String(0.15 + 0.6 * Math.sqrt(n / most)) : '0';
    return h('td', { title: n ? whole.format(n) : undefined }, shade, h('b', {}, n ? few.format(n) : ''));
  };
  const head = (s, n) => h('th', { scope: 'col' }, n % 3 === 0 ? hour.format(s * 1000) : h('span', { class: 'unseen' }, hour.format(s * 1000)));
  fill(host, h('table', { class: `heat ${what}` }, h('caption', { class: 'unseen' }, what === 'requests' ? 'Decisions by policy and hour' : 'Refusals by policy and hour'),
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, h('span', { class: 'unseen' }, 'Policy')), hours.map(head))),
    h('tbody', {}, rows.slice(0, 12).map(({ policy, cells }) => h('tr', {}, h('th', { scope: 'row' }, policy.name), cells.map(cell))))),
    rows.length > 12 ? h('p', { class: 'foot' }, `The ${rows.length - 12} policies with less are left out.`) : null);
  host.scrollLeft = host.scrollWidth; // on a phone, now is what is seen first
}

const SOURCES = { redis: 'Redis', memory: 'memory', lease: 'a lease in hand', deny_cache: 'known refusals', degraded: 'without the store' };
/** Where a duration stands between 10 µs and 1 s, by its logarithm. */
const along = (s) => `${Math.min(100, Math.max(0, (20 * (Math.log10(Math.max(s, 1e-5)) + 5))))}%`;

function drawLatency({ overview }) {
  const { window_s, decisions, responses } = overview.latency;
  say($('latency-window'), window_s ? `in the last ${lasting(window_s)}` : '');
  const rows = [...Object.entries(decisions).map(([id, times]) => [SOURCES[id] ?? id, times]), ['whole answers, with the app', responses]].filter(([, times]) => times.count > 0);
  const host = $('latency');
  if (rows.length === 0) { fill(host, h('p', { class: 'empty' }, 'Nothing was decided in the last minute.')); return; }
  const row = ([name, times]) => {
    const range = h('i', {});
    const middle = h('b', {});
    range.style.left = along(times.p50_s);
    range.style.width = `calc(${along(times.p99_s)} - ${along(times.p50_s)})`;
    middle.style.left = along(times.p50_s);
    return h('tr', {}, h('th', { scope: 'row' }, name), h('td', { class: 'wide' }, h('div', { class: 'range', 'aria-hidden': 'true', title: 'from the half to 99 %, between 10 µs and 1 s' }, range, middle)),
      ['p50_s', 'p99_s', 'p999_s'].map((name_) => h('td', { class: 'num' }, took(times[name_]))), h('td', { class: 'num quiet' }, count(times.count)));
  };
  fill(host, h('table', { class: 'latency' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Decided by'), h('th', { scope: 'col', class: 'wide' }, h('span', { class: 'unseen' }, 'Picture')), ['50 %', '99 %', '99.9 %', 'Count'].map((word) => h('th', { scope: 'col', class: 'num' }, word)))), h('tbody', {}, rows.map(row))));
}

function drawLists({ overview, offset_s }) {
  const { store, instance, http, last_reload } = overview;
  const line = (term, ...what) => [h('dt', {}, term), h('dd', {}, what)];
  const list = (counts) => Object.entries(counts).filter(([, n]) => n > 0).map(([kind, n]) => `${kind} ${count(n)}`).join(', ') || 'none';
  fill($('store'), line('Kind', store.kind === 'redis' ? `Redis, ${store.address}` : 'memory: counters of this process alone'),
    line('State', store.up ? '✓ answers' : '✕ away', store.breaker_open ? ', breaker open' : ', breaker closed'),
    line('Store errors', list(store.errors)),
    store.memory && line('Memory', `${many(store.memory.keys, 'counter')}, ${bytes(store.memory.bytes)}, ${many(store.memory.evictions, 'eviction')}`),
    store.instances !== null && line('Fleet', store.instances > 1 ? `${store.instances} instances share these limits; you see one of them` : 'this instance alone'),
    store.lease_units_lost ? line('Leases', `${many(store.lease_units_lost, 'unit')} not given back`) : null,
    line('Workers', String(instance.workers)), line('Upstream errors', list(http.upstream_errors)), line('Answers', list(http.codes)));
  fill($('config'), line('Generation', String(overview.generation)), line('Last read', ago(last_reload.at_s, offset_s), last_reload.errors.length ? ', refused' : ', in effect'), line('Refused', many(last_reload.refused, 'time')), line('Started', ago(instance.started_s, offset_s)), line('Version', instance.version));
  say($('instance'), `instance ${instance.id.slice(0, 8)}, up ${lasting(instance.uptime_s)}`);
  $('instance').title = instance.id;
}
