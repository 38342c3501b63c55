'use strict';
// The sections of the page. Each is rendered from the latest responses.

const ICONS = { good: 'M4 11l4 4 8-9', warn: 'M10 3l8 14H2zM10 8v4M10 14.5v.1', bad: 'M7 2h6l5 5v6l-5 5H7l-5-5V7zM7.5 7.5l5 5M12.5 7.5l-5 5' };
const LEVELS = { good: 'Good', warn: 'Warning', bad: 'Error' };

/** Problems of the overview for which this page has texts of its own. */
const OWN_TEXTS = new Set(['reload', 'untrusted_forwarding']);
const toSentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

/** Returns the current problems. `id` identifies a problem; `more` are nodes below the text. */
function collectAlerts({ overview, connectionError }) {
  const alerts = [];
  const add = (id, level, title, text, ...more) => alerts.push({ id, level, title, text, more });
  if (connectionError) {
    add('gone', 'bad', connectionError.silent ? 'This instance does not respond.' : 'This instance answers with an error.', `${connectionError.why}. ${overview ? `The data is from ${formatTime(connectionError.since_s)}.` : 'There is no data yet.'} The page keeps retrying.`);
  }
  if (!overview) return alerts;
  const { status, last_reload } = overview;
  if (status !== 'ready') {
    add('phase', 'warn', `This instance is ${status}.`, status === 'stopping' ? 'It shuts down gracefully: readiness fails and requests in flight continue.' : 'Clients can’t connect yet.');
  }
  if (last_reload.errors.length) {
    add('reload', 'bad', 'The newest configuration is invalid.', `Generation ${overview.generation}, the last valid one, stays in effect. Errors:`, createElement('pre', {}, last_reload.errors.join('\n')));
  }
  if (overview.untrusted_forwarding) {
    const peers = overview.untrusted_peers;
    const nets = peers.map((peer) => `"${peer}${peer.includes(':') ? '/128' : '/32'}"`).join(', ');
    add('trust', 'warn', 'An untrusted peer sends forwarding headers.',
      `${pluralize(overview.untrusted_forwarding, 'request')} came with a forwarding header from ${peers.join(', ') || 'a peer'}, outside client.trusted_proxies: the header is ignored. If the peer is your ingress, all clients behind it share one quota until you list its address or network:`,
      createElement('pre', {}, `[client]\ntrusted_proxies = [${nets}]`));
  }
  for (const { id, level, title, remedy } of overview.problems) {
    if (!OWN_TEXTS.has(id)) add(id, level === 'error' ? 'bad' : 'warn', toSentence(title), toSentence(remedy));
  }
  const now = overview.last_reload.at_s && Date.now() / 1000;
  for (const { file, ends_s } of overview.certificates) {
    if (ends_s < now + 14 * 86400) add(`cert ${file}`, ends_s < now ? 'bad' : 'warn', ends_s < now ? 'A certificate has expired.' : 'A certificate expires soon.', `${file}: ${dateTimeFormat.format(ends_s * 1000)}.`);
  }
  if (overview.connections.open >= overview.connections.max) add('full', 'warn', 'The connection limit is reached.', `All ${integerFormat.format(overview.connections.max)} are in use: new connections wait. See listen.max_connections.`);
  return alerts;
}

/** Shows the warnings of the configuration in effect. They are no problem of this moment. */
function drawConfigWarnings({ overview: { warnings } }) {
  $('config-warnings').hidden = warnings.length === 0;
  setText($('config-warnings-title'), `The configuration has ${pluralize(warnings.length, 'warning')}`);
  setText($('config-warnings-list'), warnings.join('\n'));
}

function drawAlerts(state) {
  const alerts = collectAlerts(state);
  const calm = { id: 'calm', level: 'good', title: 'No problems.', text: 'The store responds and the newest configuration is in effect.', more: [] };
  const shown = alerts.length || !state.overview ? alerts : [calm];
  reconcileChildren($('alerts'), shown, ({ id }) => id, ({ level }) => {
    const icon = createSvg('svg', { class: 'icon', viewBox: '0 0 20 20', role: 'img', 'aria-label': LEVELS[level] }, createSvg('path', { d: ICONS[level] }));
    return createElement('div', { class: 'alert', 'data-level': level }, icon, createElement('div', {}));
  }, (node, { level, title, text, more }) => {
    const written = [level, title, text, ...more.map((part) => part.textContent)].join('\n');
    if (node.written === written) return;
    node.written = written;
    replaceChildren(node.lastChild, createElement('p', {}, createElement('strong', {}, title), ` ${text}`), more);
  });
  announceAlerts(alerts);
}

let announced = new Map();
/** Announces new and resolved problems to screen readers, once each. */
function announceAlerts(alerts) {
  const now = new Map(alerts.map(({ id, title }) => [id, title]));
  const news = [...now].filter(([id]) => !announced.has(id)).map(([, title]) => title);
  const over = [...announced].filter(([id]) => !now.has(id)).map(([, title]) => `Resolved: ${title}`);
  if (news.length || over.length) setText($('spoken'), [...news, ...over].join(' '));
  announced = now;
}

function drawTiles({ overview }) {
  const { seconds } = overview.requests;
  const outcomes = ['allowed', 'delayed', 'rejected', 'blocked', 'denied', 'degraded', 'degraded_refused', 'malformed'];
  const last = (id, n) => sum(seconds[id].slice(-1 - n, -1));
  const span = Math.min(60, Math.max(1, seconds.at.length - 1));
  const all = outcomes.reduce((n, id) => n + last(id, span), 0);
  const now = outcomes.reduce((n, id) => n + last(id, 5), 0) / Math.min(5, span);
  const refused = REFUSED.reduce((n, id) => n + last(id, span), 0);
  const [degraded, degradedRefused] = ['degraded', 'degraded_refused'].map((id) => last(id, span));
  const { store, latency, connections, http } = overview;
  const mainSource = Object.entries(latency.decisions).sort(([, a], [, b]) => b.count - a.count)[0];
  const failed = Object.values(http.upstream_errors).reduce((n, m) => n + m, 0);
  const failures = [failed && pluralize(failed, 'upstream error'), http.app_errors && `${pluralize(http.app_errors, 'response')} 5xx of the app`].filter(Boolean).join(', ');
  const tiles = [
    ['Requests per second', formatRate(now), '', `${pluralize(all, 'request')} in ${formatDuration(span)}`],
    ['Refused', formatPercent(refused, all), '', `${formatCount(refused)} in ${formatDuration(span)}`],
    ['Decided without the store', formatPercent(degraded + degradedRefused, all), '', `${formatCount(degraded)} admitted, ${formatCount(degradedRefused)} refused`, degraded + degradedRefused ? 'warn' : ''],
    ['Store', store.up ? (store.breaker_open ? 'Breaker open' : 'Up') : 'Down', '', store.kind === 'memory' ? 'in memory' : store.address, store.up && !store.breaker_open ? '' : 'bad'],
    ['Median decision time', mainSource ? formatLatency(mainSource[1].p50_s) : '–', '', mainSource ? `99 % within ${formatLatency(mainSource[1].p99_s)}` : `none in ${formatDuration(span)}`],
    ['Connections', formatCount(connections.open), ` of ${formatCount(connections.max)}`, failures || 'no upstream error'],
  ];
  reconcileChildren($('tiles'), tiles, ([title]) => title, ([title]) => createElement('div', { class: 'tile' }, createElement('h2', {}, title), createElement('p', { class: 'value' }), createElement('p', { class: 'more' })), (node, [, value, small, more, level]) => {
    if (node.children[1].textContent !== value + small) replaceChildren(node.children[1], value, small && createElement('small', {}, small));
    setText(node.children[2], more);
    node.children[2].title = more;
    node.dataset.level = level ?? '';
  });
}

const traffic = new StackedBarChart($('traffic'), (shown, columns) => `Requests by decision over time. ${shown.map(({ id, label }) => `${label} at most ${formatRate(Math.max(...columns[id]))} per second`).join(', ') || 'None'}. The table below has the numbers.`, formatRate);

function drawTraffic({ overview }, span_s) {
  const { seconds } = overview.requests;
  const step = span_s > 120 ? 5 : 1;
  const first = Math.ceil((seconds.at[seconds.at.length - 1] - span_s) / step) * step;
  const times = Array.from({ length: Math.floor(span_s / step) }, (_, n) => first + n * step);
  const shown = DECISIONS.filter(({ id }) => seconds[id]);
  const columns = Object.fromEntries(shown.map(({ id }) => [id, times.map(() => 0)]));
  // The last second is incomplete.
  seconds.at.slice(0, -1).forEach((s, from) => {
    const to = Math.floor((s - first) / step);
    if (to >= 0 && to < times.length) for (const { id } of shown) columns[id][to] += seconds[id][from] / step;
  });
  traffic.set(times, step, columns, `No request came in the last ${formatDuration(span_s)}.`);
  const last = (id) => sum(seconds[id].slice(-6, -1)) / Math.min(5, Math.max(1, seconds.at.length - 1));
  reconcileChildren($('traffic-legend'), shown, ({ id }) => id, ({ id, label }) => createElement('li', {}, createSwatch(id), label, createElement('span', { class: 'n' })), (node, { id }) => {
    const now = last(id);
    setText(node.lastChild, `${formatRate(now)}/s`);
    node.classList.toggle('none', now === 0);
  });
  if ($('traffic-table').closest('details').open) replaceChildren($('traffic-table'), createDataTable('Requests per second, by decision', times, columns, formatRate));
}

function policyBadges(policy) {
  const badge = (word, level) => createElement('span', { class: `badge ${level ?? ''}` }, word);
  return [policy.mode !== 'enforce' && badge(policy.mode), policy.action === 'deny' && badge('deny'), policy.action === 'allow' && badge('exempt')].filter(Boolean);
}

/** Sums a policy's series by decision. */
const sumSeries = (series) => Object.fromEntries(Object.entries(series ?? {}).map(([id, column]) => [id, sum(column)]));

/** Series of requests that a policy would have refused if it were enforced. */
const UNENFORCED = ['shadow_rejected', 'marked'];
/** Counts the requests that a policy refused, or would have refused in mode shadow or mark. */
const countRefused = (counts) => UNENFORCED.reduce((total, id) => total + (counts[id] ?? 0), sumRefused(counts));

/** Returns all and refused requests of a policy by minute. */
function minuteSeries(policy, minutes) {
  const series = policy.last_hour ?? {};
  const total = (ids) => minutes.map((_, n) => ids.reduce((all, id) => all + (series[id]?.[n] ?? 0), 0));
  return [total(DECISIONS.map(({ id }) => id)), total([...REFUSED, ...UNENFORCED])];
}

function drawPolicies({ overview, policies }, search, open) {
  const rows = policies.policies.map((policy) => ({ policy, counts: sumSeries(policy.last_hour) }));
  const none = policies.total === 0;
  $('policies').hidden = none;
  $('policies-empty').hidden = !none;
  $('policies-tools').hidden = none && !search;
  if (none && search) {
    replaceChildren($('policies-empty'), createElement('p', {}, `No policy name contains “${search}”.`));
  } else if (none && !$('policies-empty').querySelector('pre')) {
    replaceChildren($('policies-empty'), createElement('p', {}, 'No policies are configured: every request passes. An example for config.toml:'),
      createElement('pre', {}, '[[policy]]\nname = "per-client"\nkey = ["client_ip"]\nlimit = { requests = 100, per = "1m" }\nmode = "shadow"  # only counts; remove to enforce'));
  }
  setText($('policies-count'), none ? '' : search ? `${pluralize(policies.total, 'policy', 'policies')} of ${formatCount(Math.max(overview.policies, policies.total))}` : pluralize(policies.total, 'policy', 'policies'));
  reconcileChildren($('policies').tBodies[0], rows, ({ policy }) => policy.name, ({ policy }) => {
    const name = createElement('button', { type: 'button', class: 'name', onclick: () => open(policy.name) }, policy.name);
    const bar = createElement('div', { class: 'bar', role: 'img' });
    return createElement('tr', {}, createElement('th', { scope: 'row' }, name, createElement('span', {})), createElement('td', { class: 'wide' }, bar), createElement('td', {}, createSparkline()), createElement('td', { class: 'num wide' }), createElement('td', { class: 'num' }), createElement('td', { class: 'num' }));
  }, (row, { policy, counts }) => {
    const [name, bar, line, passed, refused, part] = row.children;
    const kind = `${policy.mode} ${policy.action}`;
    if (name.lastChild.dataset.kind !== kind) { name.lastChild.dataset.kind = kind; replaceChildren(name.lastChild, policyBadges(policy)); }
    drawBar(bar.firstChild, counts);
    drawSparkline(line.firstChild, ...minuteSeries(policy, policies.minutes));
    const refusedCount = countRefused(counts);
    setText(passed, formatCount(sumAll(counts) - refusedCount));
    setText(refused, formatCount(refusedCount));
    setText(part, formatPercent(refusedCount, sumAll(counts)));
    refused.title = policy.mode === 'enforce' ? '' : 'would have been refused';
    for (const cell of [refused, part]) cell.classList.toggle('zero', refusedCount === 0);
  });
}

/**
 * Renders a ranking with its error bounds: a count is exact, or too high by at most its error.
 * `modes` has the mode of each policy that refuses no requests.
 */
function drawRanking(host, ranking, field, empty, modes, open) {
  if (ranking.entries.length === 0) {
    replaceChildren(host, createElement('p', { class: 'empty' }, empty));
    host.table = undefined;
    return;
  }
  if (!host.table) {
    const title = field === 'key' ? 'Key' : 'Path';
    host.table = createElement('table', { class: 'rank' }, createElement('thead', {}, createElement('tr', {}, createElement('th', { scope: 'col' }, title), createElement('th', { scope: 'col' }, 'Policy'), createElement('th', { scope: 'col', class: 'num' }, 'Refused'))), createElement('tbody', {}));
    replaceChildren(host, host.table, createElement('p', { class: 'foot' }));
  }
  const most = ranking.entries[0].count;
  reconcileChildren(host.table.tBodies[0], ranking.entries, (entry) => `${entry.policy}\n${entry[field]}`, (entry) => {
    const shown = decodeNonAscii(field === 'key' ? keyWithoutPolicy(entry.key) : entry.path);
    const cell = field === 'key' ? createElement('button', { type: 'button', class: 'name mono', onclick: () => open(entry.policy, entry.key) }, shown) : createElement('span', { class: 'mono wrap' }, shown);
    return createElement('tr', {}, createElement('th', { scope: 'row', class: 'wrap', title: shown === entry[field] ? undefined : entry[field] }, cell), createElement('td', { class: 'wrap' }, entry.policy, ' ', createElement('span', { class: 'badge', hidden: true })), createElement('td', { class: 'num' }, createElement('span', { class: 'n' }, createElement('i', {}), createElement('b', {}))));
  }, (row, entry) => {
    const [bar, n] = row.lastChild.firstChild.children;
    bar.style.width = `${(100 * entry.count) / most}%`;
    const mode = modes.get(entry.policy);
    row.children[1].lastChild.hidden = !mode;
    setText(row.children[1].lastChild, mode ?? '');
    setText(n, entry.error ? `${formatCount(entry.count - entry.error)}–${formatCount(entry.count)}` : formatCount(entry.count));
    row.lastChild.title = entry.error ? `between ${integerFormat.format(entry.count - entry.error)} and ${integerFormat.format(entry.count)}` : `exactly ${integerFormat.format(entry.count)}`;
  });
  const rest = ranking.unseen_at_most ? ` Entries beyond those tracked were refused at most ${pluralize(ranking.unseen_at_most, 'time')} each.` : ' All entries are tracked: counts are exact.';
  setText(host.lastChild, `${ranking.ofAllPolicies ? 'All policies: ' : ''}${pluralize(ranking.refused, 'refusal')} ${field === 'key' ? 'by a limit' : 'by a policy'} since ${ranking.since_s ? hourFormat.format(ranking.since_s * 1000) : 'the start'}.${rest}`);
}

/** Renders the heat map of the busiest policies of the last hour, by hour. Each cell also shows its number. */
function drawHeatmap({ busiest: policies }, metric) {
  const { hours } = policies;
  const ids = metric === 'requests' ? DECISIONS.map(({ id }) => id) : [...REFUSED, ...UNENFORCED];
  const of = (policy, n) => ids.reduce((all, id) => all + (policy.last_day?.[id]?.[n] ?? 0), 0);
  const rows = policies.policies.map((policy) => ({ policy, cells: hours.map((_, n) => of(policy, n)) })).filter(({ cells }) => sum(cells) > 0);
  rows.sort((a, b) => sum(b.cells) - sum(a.cells));
  const host = $('heat');
  const drawn = JSON.stringify([metric, hours, rows.map(({ policy, cells }) => [policy.name, cells])]);
  if (host.drawn === drawn) return;
  host.drawn = drawn;
  if (rows.length === 0) {
    replaceChildren(host, createElement('p', { class: 'empty' }, metric === 'requests' ? 'No decisions in the last day.' : 'No refusals in the last day.'));
    return;
  }
  const most = Math.max(...rows.flatMap(({ cells }) => cells));
  const cell = (n) => {
    const shade = createElement('i', {});
    shade.style.opacity = n ? String(0.15 + 0.6 * Math.sqrt(n / most)) : '0';
    return createElement('td', { title: n ? integerFormat.format(n) : undefined }, shade, createElement('b', {}, n ? compactFormat.format(n) : ''));
  };
  const head = (s, n) => createElement('th', { scope: 'col' }, n % 3 === 0 ? hourFormat.format(s * 1000) : createElement('span', { class: 'unseen' }, hourFormat.format(s * 1000)));
  replaceChildren(host, createElement('table', { class: `heat ${metric}` }, createElement('caption', { class: 'unseen' }, metric === 'requests' ? 'Decisions by policy and hour' : 'Refusals by policy and hour'),
    createElement('thead', {}, createElement('tr', {}, createElement('th', { scope: 'col' }, createElement('span', { class: 'unseen' }, 'Policy')), hours.map(head))),
    createElement('tbody', {}, rows.map(({ policy, cells }) => createElement('tr', {}, createElement('th', { scope: 'row' }, policy.name), cells.map(cell))))),
    policies.total > rows.length ? createElement('p', { class: 'foot' }, `The ${rows.length === 1 ? 'policy' : `${rows.length} policies`} with the highest recent counts.`) : null);
  host.scrollLeft = host.scrollWidth; // shows the latest hours first on a narrow screen
}

const SOURCES = { redis: 'Redis', memory: 'memory', lease: 'lease', deny_cache: 'deny cache', degraded: 'without the store' };
/** Returns the position of a duration on a logarithmic scale from 10 µs to 1 s, in percent. */
const logPosition = (s) => `${Math.min(100, Math.max(0, (20 * (Math.log10(Math.max(s, 1e-5)) + 5))))}%`;

function drawLatency({ overview }) {
  const { window_s, decisions, responses } = overview.latency;
  setText($('latency-window'), window_s ? `in the last ${formatDuration(window_s)}` : '');
  const rows = [...Object.entries(decisions).map(([id, times]) => [SOURCES[id] ?? id, times]), ['responses, including the upstream', responses]].filter(([, times]) => times.count > 0);
  const host = $('latency');
  if (rows.length === 0) { replaceChildren(host, createElement('p', { class: 'empty' }, 'No decisions in the last minute.')); return; }
  const row = ([name, times]) => {
    const range = createElement('i', {});
    const middle = createElement('b', {});
    range.style.left = logPosition(times.p50_s);
    range.style.width = `calc(${logPosition(times.p99_s)} - ${logPosition(times.p50_s)})`;
    middle.style.left = logPosition(times.p50_s);
    return createElement('tr', {}, createElement('th', { scope: 'row' }, name), createElement('td', { class: 'wide' }, createElement('div', { class: 'range', 'aria-hidden': 'true', title: 'median to 99 %, on a scale from 10 µs to 1 s' }, range, middle)),
      ['p50_s', 'p99_s', 'p999_s'].map((quantile) => createElement('td', { class: 'num' }, formatLatency(times[quantile]))), createElement('td', { class: 'num quiet' }, formatCount(times.count)));
  };
  replaceChildren(host, createElement('table', { class: 'latency' }, createElement('thead', {}, createElement('tr', {}, createElement('th', { scope: 'col' }, 'Decided by'), createElement('th', { scope: 'col', class: 'wide' }, createElement('span', { class: 'unseen' }, 'Range')), ['50 %', '99 %', '99.9 %', 'Count'].map((word) => createElement('th', { scope: 'col', class: 'num' }, word)))), createElement('tbody', {}, rows.map(row))));
}

function drawDetails({ overview, offset_s }) {
  const { store, instance, http, last_reload } = overview;
  const line = (term, ...values) => [createElement('dt', {}, term), createElement('dd', {}, values)];
  const list = (counts) => Object.entries(counts).filter(([, n]) => n > 0).map(([kind, n]) => `${kind}: ${formatCount(n)}`).join(', ') || 'none';
  replaceChildren($('store'), line('Kind', store.kind === 'redis' ? `Redis, ${store.address}` : 'memory: counters of this process only'),
    line('State', store.up ? '✓ up' : '✕ down', store.breaker_open ? ', breaker open' : ', breaker closed'),
    line('Store errors', list(store.errors)),
    store.memory && line('Memory', `${pluralize(store.memory.keys, 'counter')}, ${formatBytes(store.memory.bytes)}, ${pluralize(store.memory.evictions, 'eviction')}`),
    store.instances !== null && line('Fleet', store.instances > 1 ? `${store.instances} instances share these limits; this page shows one of them` : 'only this instance'),
    store.lease_units_lost ? line('Leases', `${pluralize(store.lease_units_lost, 'unit')} not returned`) : null,
    line('Workers', String(instance.workers)), line('Upstream errors', list(http.upstream_errors)), line('Responses', list(http.codes)));
  replaceChildren($('config'), line('Generation', String(overview.generation)), line('Last read', createRelativeTime(last_reload.at_s, offset_s), last_reload.errors.length ? ', rejected' : ', in effect'), line('Rejected', pluralize(last_reload.refused, 'time')), line('Restart needed for', last_reload.pending_restart.join(', ') || 'nothing'), line('Started', createRelativeTime(instance.started_s, offset_s)), line('Version', instance.version));
  setText($('instance'), `${instance.host}, instance ${instance.id.slice(0, 8)}, up ${formatDuration(instance.uptime_s)}`);
  document.title = `tidegate on ${instance.host}`;
  $('instance').title = instance.id;
}
