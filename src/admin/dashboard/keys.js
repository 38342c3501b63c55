'use strict';
// The policy dialog: description, recent decisions and most refused keys of a policy, and the state
// and reset of one key.

/** Returns a readable key (`policy/value/value`) without its policy. */
const keyWithoutPolicy = (text) => text.split('/').slice(1).join('/') || '(no key)';

/** Returns a text with a capital letter. */
const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Returns the values of a readable key, or `null` if they are hashed or truncated. */
function parseKeyValues(text) {
  const parts = text.split('/').slice(1);
  if (text.endsWith('...') || parts.some((part) => /^[#+]/.test(part))) return null;
  try {
    return parts.map((part) => (part === '-' ? '' : decodeURIComponent(part)));
  } catch {
    return null; // not valid UTF-8
  }
}

/** The policy dialog. `request` calls the admin API; `requestToken` prompts for a token. */
class PolicyDialog {
  constructor(request, requestToken) {
    Object.assign(this, { request, requestToken, dialog: $('policy') });
    $('policy-close').addEventListener('click', () => this.dialog.close());
    this.dialog.addEventListener('click', (event) => { if (event.target === this.dialog) this.dialog.close(); });
    this.dialog.addEventListener('close', () => { this.chart?.destroy(); this.chart = undefined; this.name = undefined; if (location.hash) history.replaceState(null, '', location.pathname); });
  }

  /** Opens the dialog. If `key` is given, also looks up that key. */
  async open(name, key) {
    this.name = name;
    history.replaceState(null, '', `#policy=${encodeURIComponent(name)}`);
    setText($('policy-title'), name);
    replaceChildren($('policy-badges'));
    replaceChildren($('policy-body'), createElement('p', { class: 'quiet' }, 'Loading…'));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const response = await this.request(`/policies?policy=${encodeURIComponent(name)}`);
      if (this.name !== name) return;
      if (response.policies.length === 0) { replaceChildren($('policy-body'), createElement('p', {}, 'This policy no longer exists.')); return; }
      splitDegraded(response.policies[0].last_hour);
      this.build(response.policies[0]);
      this.draw(response);
      await this.refresh();
      if (key) this.lookUpText(key);
    } catch (error) {
      replaceChildren($('policy-body'), createElement('p', { class: 'error', role: 'alert' }, error.message));
    }
  }

  build(policy) {
    this.policy = policy;
    const limits = policy.limits ?? [];
    replaceChildren($('policy-badges'), policyBadges(policy));
    this.chart?.destroy();
    const chart = createElement('div', { class: 'chart' });
    this.table = createElement('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'The last hour, as a table' });
    this.details = createElement('details', { class: 'as-table' }, createElement('summary', {}, 'As a table'), this.table);
    this.details.addEventListener('toggle', () => this.response && this.draw(this.response));
    this.legend = createElement('ul', { class: 'legend', 'aria-label': 'In the last hour' });
    this.keys = createElement('div', {});
    const fact = (term, value) => value && [createElement('dt', {}, term), createElement('dd', {}, value)];
    const failureModes = { open: 'requests are allowed', closed: 'requests are refused', local: 'this instance enforces its share of the limits' };
    replaceChildren($('policy-body'), createElement('p', {}, policy.words),
      limits.length > 0 && createElement('table', {}, createElement('caption', { class: 'unseen' }, 'Limits'),
        createElement('thead', {}, createElement('tr', {}, ['Limit', 'Maximum', 'Algorithm'].map((word) => createElement('th', { scope: 'col' }, word)))),
        createElement('tbody', {}, limits.map((limit) => createElement('tr', {}, createElement('th', { scope: 'row' }, limit.name), createElement('td', {}, `${integerFormat.format(limit.requests)} ${limit.unit ?? ''} ${limit.per ? `per ${limit.per}${limit.tz ? ` (${limit.tz})` : ''}` : 'at a time'}${limit.burst ? `, bursts of ${integerFormat.format(limit.burst)}` : ''}${limit.requests_from ? `, unless the ${limit.requests_from} states another amount, up to ${integerFormat.format(limit.max)}` : ''}`), createElement('td', {}, limit.algorithm))))),
      createElement('h3', {}, 'Settings'),
      createElement('dl', {}, fact('Key', policy.key && (policy.key.join(', ') || 'none: one quota for all requests')), fact('On store failure', failureModes[policy.on_store_failure]), fact('Priority', policy.priority !== undefined && String(policy.priority)),
        fact('Overrides', policy.overrides ? pluralize(policy.overrides, 'key') : null), fact('Blocks for', policy.block_s && formatDuration(policy.block_s)), fact('Lease', policy.lease && `${policy.lease.size} units, ${formatDuration(policy.lease.ttl_s)}`)),
      createElement('h3', {}, 'The last hour, by minute'), this.legend, chart, this.details,
      policy.action === 'limit' && [createElement('h3', {}, 'Keys refused most'), this.keys, createElement('h3', {}, 'State of a key'), this.createLookUpForm(policy)],
      policy.dynamic && [createElement('h3', {}, 'Overrides of single keys'), new OverridePanel(this.request, this.requestToken, policy).element]);
    this.chart = new StackedBarChart(chart, (shown, columns) => `Decisions by minute. ${shown.map(({ id, label }) => `${label} ${formatCount(sum(columns[id]))}`).join(', ') || 'None'} in the last hour.`, formatCount);
  }

  draw(response) {
    this.response = response;
    const series = response.policies[0].last_hour ?? {};
    this.chart.set(response.minutes, 60, series, 'No decisions in the last hour.');
    const sums = sumSeries(series);
    replaceChildren(this.legend, DECISIONS.filter(({ id }) => sums[id] > 0).map(({ id, label }) => createElement('li', {}, createSwatch(id), label, createElement('span', { class: 'n' }, formatCount(sums[id])))));
    if (this.details.open) replaceChildren(this.table, createDataTable('Decisions by minute', response.minutes, series, formatCount));
  }

  /** Refreshes the data while the dialog is open. */
  async refresh() {
    const name = this.name;
    if (!name || !this.chart) return;
    const encodedName = encodeURIComponent(name);
    const [response, top] = await Promise.all([this.request(`/policies?policy=${encodedName}`), this.request(`/top?n=8&policy=${encodedName}`)]);
    if (this.name !== name || !this.chart || response.policies.length === 0) return;
    splitDegraded(response.policies[0].last_hour);
    this.draw(response);
    // The sum is that of all policies, also if the entries are of one.
    drawRanking(this.keys, { ...top.keys, ofAllPolicies: true }, 'key', 'No refusals in the last half hour.', new Map(), (_, key) => this.lookUpText(key));
  }

  createLookUpForm(policy) {
    const positions = policy.key ?? [];
    this.inputs = positions.map(() => createElement('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off' }));
    this.result = createElement('div', { class: 'answer', role: 'status' });
    const submitLookUp = (event) => { event.preventDefault(); this.lookUp(this.inputs.map((input) => input.value)); };
    return createElement('form', { onsubmit: submitLookUp },
      createElement('div', { class: 'fields' }, positions.map((description, n) => createElement('label', {}, description, this.inputs[n]))),
      createElement('button', { type: 'submit' }, positions.length ? 'Look up' : 'Show'), this.result);
  }

  lookUpText(text) {
    const values = parseKeyValues(text);
    if (!values) {
      replaceChildren(this.result, createElement('p', {}, 'This key is truncated or hashed, so its values are unknown. Enter them above.'));
      this.result.scrollIntoView({ block: 'nearest' });
      return;
    }
    this.inputs.forEach((input, n) => { input.value = values[n] ?? ''; });
    this.lookUp(values);
  }

  target(values) {
    return `/keys?${new URLSearchParams([['policy', this.name], ...values.map((value) => ['key', value])])}`;
  }

  async lookUp(values, before) {
    try {
      const key = await this.request(this.target(values));
      replaceChildren(this.result, before, this.renderLimitStatus(key), this.createResetControl(values));
    } catch (error) {
      replaceChildren(this.result, before, createElement('p', { class: 'error' }, error.message));
    }
    this.result.scrollIntoView({ block: 'nearest' });
  }

  renderLimitStatus(key) {
    const isBlocked = key.limits.some((limit) => limit.override === 'blocked');
    const verdict = isBlocked ? `✕ ${key.override_words ? capitalize(key.override_words) : 'Blocked by an override'}.` : key.blocked_s !== null ? `✕ Blocked for ${formatDuration(key.blocked_s)} more.` : key.admitted ? '✓ The next request passes.' : '✕ The next request is refused.';
    const row = (limit) => {
      if (limit.override === 'unlimited' || limit.override === 'blocked') return createElement('tr', {}, createElement('th', { scope: 'row' }, limit.name), createElement('td', { colspan: '4' }, `${limit.override} by an override`));
      if (limit.used + limit.remaining === 0) return createElement('tr', {}, createElement('th', { scope: 'row' }, limit.name), createElement('td', { colspan: '4' }, 'the limit is 0'));
      const all = limit.used + limit.remaining;
      const full = createElement('i', {});
      full.style.width = `${all ? (100 * limit.used) / all : 0}%`;
      return createElement('tr', {}, createElement('th', { scope: 'row' }, limit.name), createElement('td', {}, createElement('div', { class: limit.remaining ? 'meter' : 'meter full', 'aria-hidden': 'true' }, full)),
        createElement('td', { class: 'num' }, `${integerFormat.format(limit.used)} used`), createElement('td', { class: 'num' }, `${integerFormat.format(limit.remaining)} ${limit.unit ? `${limit.unit} ` : ''}left`), createElement('td', { class: 'num quiet' }, limit.grows_in_s === null ? 'unused' : `more in ${limit.grows_in_s < 10 ? formatLatency(limit.grows_in_s) : formatDuration(limit.grows_in_s)}`));
    };
    return [!isBlocked && key.override_words && createElement('p', {}, `${capitalize(key.override_words)}.`), createElement('p', {}, createElement('strong', {}, key.mode && key.mode !== 'enforce' ? `${verdict} (A policy in mode ${key.mode} does not refuse requests.)` : verdict), ' ', createElement('code', { class: 'wrap', title: key.key }, decodeNonAscii(key.key))),
      createElement('div', { class: 'scroll' }, createElement('table', { class: 'stand' }, createElement('caption', { class: 'unseen' }, 'State of the key'), createElement('tbody', {}, key.limits.map(row))))];
  }

  /** Creates the reset control. It asks for confirmation, against accidental resets. */
  createResetControl(values) {
    const host = createElement('p', { class: 'line' });
    const resetButton = createElement('button', { type: 'button', onclick: () => { replaceChildren(host, 'Reset all counters of this key?', confirmButton, cancelButton); confirmButton.focus(); } }, 'Reset this key…');
    const confirmButton = createElement('button', { type: 'button', class: 'main', onclick: () => this.reset(values) }, 'Reset');
    const cancelButton = createElement('button', { type: 'button', onclick: () => { replaceChildren(host, resetButton); resetButton.focus(); } }, 'Cancel');
    replaceChildren(host, resetButton);
    return host;
  }

  async reset(values) {
    try {
      const response = await this.request(this.target(values), 'DELETE');
      await this.lookUp(values, createElement('p', {}, createElement('strong', {}, `✓ Reset: ${[...response.limits, ...(response.unblocked ? ['block'] : [])].join(', ') || 'nothing was counted'}.`)));
    } catch (error) {
      if (error.status === 401 && (await this.requestToken())) { await this.reset(values); return; }
      replaceChildren(this.result, createElement('p', { class: 'error' }, error.message), this.createResetControl(values));
    }
  }
}
