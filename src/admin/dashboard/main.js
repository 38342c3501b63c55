'use strict';
// Polls the instance every two seconds and renders the responses.

/** Poll interval, request timeout, and longest poll interval after failures. */
const POLL_INTERVAL_MS = 2000;
const REQUEST_TIMEOUT_MS = 5000;
const MAX_POLL_INTERVAL_MS = 10000;
/** Length of the per-second history of an instance, in seconds. */
const MAX_HISTORY_S = 600;
/** Poll interval of the fleet: every request for it also asks the other instances. */
const FLEET_INTERVAL_MS = 6000;
/** Number of policies to fetch at once. */
const POLICIES_PER_PAGE = 50;
/** Number of policies in the heat map. */
const HEATMAP_POLICIES = 12;

const state = { overview: null, policies: null, busiest: null, top: null, fleet: null, fleetAt: 0, connectionError: null, offset_s: 0, from: 0, paused: false, failures: 0, seen_s: 0 };
const TOKEN_STORAGE_KEY = 'tidegate.token';
let token = sessionStorage.getItem(TOKEN_STORAGE_KEY) ?? '';

/** Calls the admin API. Errors have the HTTP status, or status 0 if there was no response. */
async function fetchJson(target, method = 'GET', body = undefined) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(target, { method, headers, body: body && JSON.stringify(body), cache: 'no-store', credentials: 'omit', redirect: 'error', signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS * (method === 'GET' && target !== '/doctor' ? 1 : 2)) });
  } catch (error) {
    throw Object.assign(new Error(error.name === 'TimeoutError' ? 'No response within 5 s' : 'The connection failed'), { status: 0 });
  }
  const json = await response.json().catch(() => null);
  if (response.ok && json) return json;
  throw Object.assign(new Error(json?.detail ? `${response.status}: ${json.detail}` : `${response.status} ${response.statusText}`), { status: response.status });
}

const selectedSpan = () => Number(document.querySelector('input[name=span]:checked').value);
const selectedSearch = () => $('policies-search').value.trim();
const selectedHeatmap = () => document.querySelector('input[name=heat]:checked').value;
const policyDialog = new PolicyDialog(fetchJson, askForToken);
setUpDoctor(fetchJson);
const openPolicy = (name, key) => policyDialog.open(name, key);

/** The mode of each policy that refuses no requests, on the pages fetched so far. */
const unenforcedModes = new Map();

function render() {
  drawAlerts(state);
  $('main').hidden = !state.overview && !state.connectionError;
  $('main').classList.toggle('stale', Boolean(state.connectionError));
  if (!state.overview) return;
  drawConfigWarnings(state);
  drawTiles(state);
  drawTraffic(state, selectedSpan());
  drawLatency(state);
  drawDetails(state);
  if (state.policies) {
    drawPolicies(state, selectedSearch(), openPolicy);
    drawHeatmap(state, selectedHeatmap());
    const { total, policies, offset } = state.policies;
    policies.forEach(({ name, mode }) => (['shadow', 'mark'].includes(mode) ? unenforcedModes.set(name, mode) : unenforcedModes.delete(name)));
    $('policies-pages').hidden = total <= POLICIES_PER_PAGE;
    setText($('policies-page'), `${offset + 1} to ${offset + policies.length} of ${integerFormat.format(total)}`);
    $('policies-back').disabled = offset === 0;
    $('policies-on').disabled = offset + policies.length >= total;
    // A reload may have removed the policies of this page.
    if (policies.length === 0 && offset > 0) selectPolicies();
  }
  if (state.top) {
    drawRanking($('keys'), state.top.keys, 'key', 'No policy refused a key recently.', unenforcedModes, openPolicy);
    drawRanking($('paths'), state.top.paths, 'path', 'No policy refused a path recently.', unenforcedModes);
    const withoutStore = sum(state.overview.requests.seconds.degraded_refused);
    $('keys-note').hidden = !withoutStore;
  }
}

/** Fetches and renders the fleet at its own interval. A failure does not affect the rest of the page. */
async function refreshFleet() {
  if (state.overview.store.kind === 'memory' || Date.now() - state.fleetAt < FLEET_INTERVAL_MS) return;
  state.fleetAt = Date.now();
  const failure = (error) => ({ ...(state.fleet ?? EMPTY_FLEET), problem: error.message });
  state.fleet = await fetchJson('/fleet?n=10').catch(failure);
  drawFleet(state, unenforcedModes, openPolicy);
}
const EMPTY_RANKING = { since_s: 0, refused: 0, unseen_at_most: 0, entries: [] };
const EMPTY_FLEET = { shared: true, total: 0, decisions_per_s: 0, instances: [], keys: EMPTY_RANKING, paths: EMPTY_RANKING };

/** Shows the connection state in the header. */
function updateConnectionState() {
  const [name, label] = !$('locked').hidden ? ['wait', 'Locked'] : state.connectionError ? ['gone', `No response for ${formatDuration(Date.now() / 1000 - state.connectionError.since_s)}`] : state.paused ? ['paused', 'Paused'] : state.overview ? ['live', 'Live'] : ['wait', 'Loading…'];
  $('pulse').dataset.state = name;
  setText($('pulse-text'), label);
}
setInterval(updateConnectionState, 1000);

/** Fetches and shows the current data, unless a newer round has begun. */
async function refresh(round) {
  const [overview, policies, busiest, top] = await Promise.all([fetchJson(`/overview?seconds=${Math.min(MAX_HISTORY_S, selectedSpan() + 1)}`), fetchJson(`/policies?${new URLSearchParams({ limit: POLICIES_PER_PAGE, offset: state.from, sort: $('policies-sort').value, search: selectedSearch() })}`), fetchJson(`/policies?limit=${HEATMAP_POLICIES}&sort=${selectedHeatmap()}`), fetchJson('/top?n=10')]);
  if (round !== currentRound) return;
  splitDegraded(overview.requests.seconds);
  for (const { last_hour, last_day } of [...policies.policies, ...busiest.policies]) { splitDegraded(last_hour); splitDegraded(last_day); }
  const known = state.overview?.instance.id;
  const seconds = overview.requests.seconds.at;
  Object.assign(state, { overview, policies, busiest, top, connectionError: null, failures: 0, seen_s: Date.now() / 1000, offset_s: seconds.length ? seconds[seconds.length - 1] - Date.now() / 1000 : 0 });
  $('locked').hidden = true;
  render();
  if (known && known !== overview.instance.id) setText($('spoken'), 'This instance has restarted; its counters start at zero.');
  refreshFleet();
  await policyDialog.refresh();
}

let timer;
let currentRound = 0;
/** Polls now and then periodically. A newer call supersedes a poll in progress. */
async function poll() {
  clearTimeout(timer);
  const thisRound = ++currentRound;
  try {
    await refresh(thisRound);
  } catch (error) {
    if (thisRound !== currentRound) return;
    if (error.status === 401) { showTokenPrompt(error); return; }
    state.failures += 1;
    // A single error response is ignored, unless there has been no successful response yet.
    if (state.failures > 1 || !state.overview || error.status === 0) {
      state.connectionError = { silent: error.status === 0, why: error.message.replace(/\.$/, ''), since_s: state.connectionError?.since_s ?? (state.seen_s || Date.now() / 1000) };
      render();
    }
  }
  if (thisRound !== currentRound) return;
  updateConnectionState();
  if (!state.paused && !document.hidden) timer = setTimeout(poll, Math.min(MAX_POLL_INTERVAL_MS, POLL_INTERVAL_MS * 2 ** Math.max(0, state.failures - 3)));
}

function showTokenPrompt(error) {
  $('main').hidden = true;
  $('locked').hidden = false;
  setText($('locked-why'), token ? `The token is invalid. (${error.message})` : '');
  $('locked-token').focus();
  updateConnectionState();
}

function setToken(value, keep) {
  token = value;
  if (keep && value) sessionStorage.setItem(TOKEN_STORAGE_KEY, value);
  else sessionStorage.removeItem(TOKEN_STORAGE_KEY);
}

$('locked-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setToken($('locked-token').value.trim(), false);
  $('locked-token').value = '';
  poll();
});

/** Prompts for a token. Resolves to whether one was entered. */
function askForToken() {
  const dialog = $('token');
  dialog.returnValue = '';
  dialog.showModal();
  $('token-value').focus();
  return new Promise((done) => dialog.addEventListener('close', () => done(dialog.returnValue === 'use'), { once: true }));
}
$('token-open').addEventListener('click', askForToken);
$('token-close').addEventListener('click', () => $('token').close(''));
$('token-forget').addEventListener('click', () => { setToken('', false); $('token').close(''); poll(); });
$('token-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const value = $('token-value').value.trim();
  $('token-value').value = '';
  if (value) setToken(value, $('token-keep').checked);
  $('token').close(value ? 'use' : '');
});

$('pause').addEventListener('click', () => {
  state.paused = !state.paused;
  $('pause').setAttribute('aria-pressed', String(state.paused));
  setText($('pause'), state.paused ? 'Resume' : 'Pause');
  if (!state.paused) poll();
  updateConnectionState();
});
document.addEventListener('visibilitychange', () => { if (!document.hidden && !state.paused) poll(); });
$('span').addEventListener('change', poll);
$('heat-what').addEventListener('change', poll);
/** Shows the first page of the policies that are now selected. */
const selectPolicies = () => { state.from = 0; poll(); };
$('policies-sort').addEventListener('change', selectPolicies);
$('policies-search').addEventListener('input', selectPolicies);
$('traffic-table').closest('details').addEventListener('toggle', () => state.overview && render());
$('policies-back').addEventListener('click', () => { state.from = Math.max(0, state.from - POLICIES_PER_PAGE); poll(); });
$('policies-on').addEventListener('click', () => { state.from += POLICIES_PER_PAGE; poll(); });
$('config-details').addEventListener('toggle', async () => {
  if (!$('config-details').open) return;
  const text = await fetchJson('/config').then((json) => JSON.stringify(json.config, null, 2), (error) => error.message);
  setText($('config-text'), text);
});

poll().then(() => {
  const linkedPolicy = /^#policy=(.+)$/.exec(location.hash);
  try { if (linkedPolicy) openPolicy(decodeURIComponent(linkedPolicy[1])); } catch { /* not a valid name */ }
});
