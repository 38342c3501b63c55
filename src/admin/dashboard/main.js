'use strict';
// Asks the instance every two seconds and draws what it says.

/** Milliseconds between questions, what a question may take, and the longest wait after failures. */
const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const LONGEST_MS = 10000;
/** Seconds that an instance remembers one by one. */
const MOST_S = 600;
/** Policies in one answer. */
const PAGE = 100;

const state = { overview: null, policies: null, top: null, gone: null, offset_s: 0, from: 0, paused: false, failures: 0, seen_s: 0 };
const kept = 'tidegate.token';
let token = sessionStorage.getItem(kept) ?? '';

/** Asks the instance. Fails with a sentence, and with the status where there was an answer. */
async function ask(target, method = 'GET') {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let answer;
  try {
    answer = await fetch(target, { method, headers, cache: 'no-store', credentials: 'omit', redirect: 'error', signal: AbortSignal.timeout(PATIENCE_MS * (method === 'GET' ? 1 : 2)) });
  } catch (error) {
    throw Object.assign(new Error(error.name === 'TimeoutError' ? 'It takes longer than 5 s' : 'The connection failed'), { status: 0 });
  }
  const said = await answer.json().catch(() => null);
  if (answer.ok && said) return said;
  throw Object.assign(new Error(said?.detail ? `${answer.status}: ${said.detail}` : `${answer.status} ${answer.statusText}`), { status: answer.status });
}

const span = () => Number(document.querySelector('input[name=span]:checked').value);
const heat = () => document.querySelector('input[name=heat]:checked').value;
const policyDialog = new PolicyDialog(ask, askForToken);
const openPolicy = (name, key) => policyDialog.open(name, key);

/** Policies that refuse nobody yet, of all pages that were seen. */
const shadows = new Set();

function draw() {
  drawAlerts(state);
  $('main').hidden = !state.overview && !state.gone;
  $('main').classList.toggle('stale', Boolean(state.gone));
  if (!state.overview) return;
  drawTiles(state);
  drawTraffic(state, span());
  drawLatency(state);
  drawLists(state);
  if (state.policies) {
    drawPolicies(state, $('policies-sort').value, openPolicy);
    drawHeat(state, heat());
    const { total, policies, offset } = state.policies;
    policies.forEach(({ name, mode }) => shadows[mode === 'shadow' ? 'add' : 'delete'](name));
    $('policies-pages').hidden = total <= PAGE;
    say($('policies-page'), `${offset + 1} to ${offset + policies.length} of ${whole.format(total)}`);
    $('policies-back').disabled = offset === 0;
    $('policies-on').disabled = offset + policies.length >= total;
  }
  if (state.top) {
    drawRanking($('keys'), state.top.keys, 'key', 'No key was refused lately.', shadows, openPolicy);
    drawRanking($('paths'), state.top.paths, 'path', 'No path was refused lately.', shadows);
  }
}

function pulse() {
  const [name, words] = !$('locked').hidden ? ['wait', 'Locked'] : state.gone ? ['gone', `No answer for ${lasting(Date.now() / 1000 - state.gone.since_s)}`] : state.paused ? ['paused', 'Paused'] : state.overview ? ['live', 'Live'] : ['wait', 'Asking…'];
  $('pulse').dataset.state = name;
  say($('pulse-text'), words);
}
setInterval(pulse, 1000);

async function look() {
  const [overview, policies, top] = await Promise.all([ask(`/overview?seconds=${Math.min(MOST_S, span() + 1)}`), ask(`/policies?limit=${PAGE}&offset=${state.from}`), ask('/top?n=10')]);
  const known = state.overview?.instance.id;
  const seconds = overview.requests.seconds.at;
  Object.assign(state, { overview, policies, top, gone: null, failures: 0, seen_s: Date.now() / 1000, offset_s: seconds.length ? seconds[seconds.length - 1] - Date.now() / 1000 : 0 });
  $('locked').hidden = true;
  draw();
  if (known && known !== overview.instance.id) say($('spoken'), 'This instance was started anew: its counts begin again.');
  await policyDialog.refresh();
}

let timer;
let round = 0;
/** Asks now, and then again and again; a question that is under way is the last of its round. */
async function turn() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    await look();
  } catch (error) {
    if (mine !== round) return;
    if (error.status === 401) { lock(error); return; }
    state.failures += 1;
    // One answer that is lost is no news, unless there has been none at all.
    if (state.failures > 1 || !state.overview || error.status === 0) {
      state.gone = { silent: error.status === 0, why: error.message.replace(/\.$/, ''), since_s: state.gone?.since_s ?? (state.seen_s || Date.now() / 1000) };
      draw();
    }
  }
  if (mine !== round) return;
  pulse();
  if (!state.paused && !document.hidden) timer = setTimeout(turn, Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.max(0, state.failures - 3)));
}

function lock(error) {
  $('main').hidden = true;
  $('locked').hidden = false;
  say($('locked-why'), token ? `That is not the token. (${error.message})` : '');
  $('locked-token').focus();
  pulse();
}

function setToken(value, keep) {
  token = value;
  if (keep && value) sessionStorage.setItem(kept, value);
  else sessionStorage.removeItem(kept);
}

$('locked-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setToken($('locked-token').value.trim(), false);
  $('locked-token').value = '';
  turn();
});

/** Has a token typed in; tells whether one was. */
function askForToken() {
  const dialog = $('token');
  dialog.returnValue = '';
  dialog.showModal();
  $('token-value').focus();
  return new Promise((done) => dialog.addEventListener('close', () => done(dialog.returnValue === 'use'), { once: true }));
}
$('token-open').addEventListener('click', askForToken);
$('token-close').addEventListener('click', () => $('token').close(''));
$('token-forget').addEventListener('click', () => { setToken('', false); $('token').close(''); turn(); });
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
  say($('pause'), state.paused ? 'Go on' : 'Pause');
  if (!state.paused) turn();
  pulse();
});
document.addEventListener('visibilitychange', () => { if (!document.hidden && !state.paused) turn(); });
for (const id of ['span', 'heat-what', 'policies-sort']) $(id).addEventListener('change', () => (id === 'span' ? turn() : state.overview && draw()));
$('traffic-table').closest('details').addEventListener('toggle', () => state.overview && draw());
$('policies-back').addEventListener('click', () => { state.from = Math.max(0, state.from - PAGE); turn(); });
$('policies-on').addEventListener('click', () => { state.from += PAGE; turn(); });
$('config-details').addEventListener('toggle', async () => {
  if (!$('config-details').open) return;
  const told = await ask('/config').then((said) => JSON.stringify(said.config, null, 2), (error) => error.message);
  say($('config-text'), told);
});

turn().then(() => {
  const named = /^#policy=(.+)$/.exec(location.hash);
  try { if (named) openPolicy(decodeURIComponent(named[1])); } catch { /* no name */ }
});
