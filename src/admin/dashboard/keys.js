'use strict';
// One policy: what it means, what it did, its hottest keys; and one key: where it stands, and giving it back its quota.

/** A key as the instance writes it, without its policy. */
const keyWords = (text) => text.split('/').slice(1).join('/') || '(one for all)';

/** The values in a key as the instance writes it: `policy/value/value`. `null` if they can't be known: hashed, or cut. */
function valuesOf(text) {
  const parts = text.split('/').slice(1);
  if (text.endsWith('...') || parts.some((part) => /^[#+]/.test(part))) return null;
  try {
    return parts.map((part) => (part === '-' ? '' : decodeURIComponent(part)));
  } catch {
    return null; // bytes that are no text
  }
}

/** The dialog for a policy. `ask` asks the instance; `needToken` has one typed in. */
class PolicyDialog {
  constructor(ask, needToken) {
    Object.assign(this, { ask, needToken, dialog: $('policy') });
    $('policy-close').addEventListener('click', () => this.dialog.close());
    this.dialog.addEventListener('click', (event) => { if (event.target === this.dialog) this.dialog.close(); });
    this.dialog.addEventListener('close', () => { this.chart?.end(); this.chart = undefined; this.name = undefined; if (location.hash) history.replaceState(null, '', location.pathname); });
  }

  /** Opens; `key` is one to look up at once. */
  async open(name, key) {
    this.name = name;
    history.replaceState(null, '', `#policy=${encodeURIComponent(name)}`);
    say($('policy-title'), name);
    fill($('policy-badges'));
    fill($('policy-body'), h('p', { class: 'quiet' }, 'Asking…'));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const told = await this.ask(`/policies?policy=${encodeURIComponent(name)}`);
      if (this.name !== name) return;
      if (told.policies.length === 0) { fill($('policy-body'), h('p', {}, 'There is no such policy any more.')); return; }
      this.build(told.policies[0]);
      this.draw(told);
      await this.refresh();
      if (key) this.lookUpText(key);
    } catch (error) {
      fill($('policy-body'), h('p', { class: 'error', role: 'alert' }, error.message));
    }
  }

  build(policy) {
    this.policy = policy;
    const limits = policy.limits ?? [];
    fill($('policy-badges'), badges(policy));
    this.chart?.end();
    const chart = h('div', { class: 'chart' });
    this.table = h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'The last hour, as a table' });
    this.details = h('details', { class: 'as-table' }, h('summary', {}, 'As a table'), this.table);
    this.details.addEventListener('toggle', () => this.told && this.draw(this.told));
    this.legend = h('ul', { class: 'legend', 'aria-label': 'In the last hour' });
    this.keys = h('div', {});
    const fact = (term, what) => what && [h('dt', {}, term), h('dd', {}, what)];
    const away = { open: 'requests are let through', closed: 'requests are refused', local: 'this instance goes on with its share' };
    fill($('policy-body'), h('p', {}, policy.words),
      limits.length > 0 && h('table', {}, h('caption', { class: 'unseen' }, 'Limits'),
        h('thead', {}, h('tr', {}, ['Limit', 'At most', 'By'].map((word) => h('th', { scope: 'col' }, word)))),
        h('tbody', {}, limits.map((limit) => h('tr', {}, h('th', { scope: 'row' }, limit.name), h('td', {}, `${whole.format(limit.requests)} ${limit.unit ?? ''} ${limit.per ? `per ${limit.per}` : 'at a time'}${limit.burst ? `, bursts of ${whole.format(limit.burst)}` : ''}`), h('td', {}, limit.algorithm))))),
      h('h3', {}, 'Settings'),
      h('dl', {}, fact('Key', policy.key && (policy.key.join(', ') || 'none: one quota for all')), fact('Store away', away[policy.on_store_failure]), fact('Priority', policy.priority !== undefined && String(policy.priority)),
        fact('Own limits', policy.overrides ? many(policy.overrides, 'key') : null), fact('Blocks for', policy.block_s && lasting(policy.block_s)), fact('Lease', policy.lease && `${policy.lease.size} units, ${lasting(policy.lease.ttl_s)}`)),
      h('h3', {}, 'The last hour, by minute'), this.legend, chart, this.details,
      policy.action === 'limit' && [h('h3', {}, 'Keys refused most'), this.keys, h('h3', {}, 'Where a key stands'), this.form(policy)]);
    this.chart = new Stack(chart, (shown, columns) => `Decisions by minute. ${shown.map(({ id, word }) => `${word} ${count(sum(columns[id]))}`).join(', ') || 'None'} in the last hour.`, count);
  }

  draw(told) {
    this.told = told;
    const series = told.policies[0].last_hour ?? {};
    this.chart.set(told.minutes, 60, series, 'It decided nothing in the last hour.');
    const sums = sumsOf(series);
    fill(this.legend, DECISIONS.filter(({ id }) => sums[id] > 0).map(({ id, word }) => h('li', {}, swatch(id), word, h('span', { class: 'n' }, count(sums[id])))));
    if (this.details.open) fill(this.table, asTable('Decisions by minute', told.minutes, series, count));
  }

  /** Draws anew what goes on while it is open. */
  async refresh() {
    const name = this.name;
    if (!name || !this.chart) return;
    const asked = encodeURIComponent(name);
    const [told, top] = await Promise.all([this.ask(`/policies?policy=${asked}`), this.ask(`/top?n=8&policy=${asked}`)]);
    if (this.name !== name || !this.chart || told.policies.length === 0) return;
    this.draw(told);
    drawRanking(this.keys, top.keys, 'key', 'It refused nobody in the last half hour.', new Set(), (_, key) => this.lookUpText(key));
  }

  form(policy) {
    const positions = policy.key ?? [];
    this.inputs = positions.map(() => h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off' }));
    this.answer = h('div', { class: 'answer', role: 'status' });
    const look = (event) => { event.preventDefault(); this.lookUp(this.inputs.map((input) => input.value)); };
    return h('form', { onsubmit: look },
      h('div', { class: 'fields' }, positions.map((words, n) => h('label', {}, words, this.inputs[n]))),
      h('button', { type: 'submit' }, positions.length ? 'Look it up' : 'Look'), this.answer);
  }

  lookUpText(text) {
    const values = valuesOf(text);
    if (!values) {
      fill(this.answer, h('p', {}, 'This key is shown in short, so its values are not known here. Type them above.'));
      this.answer.scrollIntoView({ block: 'nearest' });
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
      const key = await this.ask(this.target(values));
      fill(this.answer, before, this.standing(key), this.resetter(values));
    } catch (error) {
      fill(this.answer, before, h('p', { class: 'error' }, error.message));
    }
    this.answer.scrollIntoView({ block: 'nearest' });
  }

  standing(key) {
    const verdict = key.blocked_s !== null ? `✕ It is blocked for ${lasting(key.blocked_s)} more.` : key.admitted ? '✓ The next request passes.' : '✕ The next request is refused.';
    const row = (limit) => {
      const all = limit.used + limit.remaining;
      const full = h('i', {});
      full.style.width = `${all ? (100 * limit.used) / all : 0}%`;
      return h('tr', {}, h('th', { scope: 'row' }, limit.name), h('td', {}, h('div', { class: limit.remaining ? 'meter' : 'meter full', 'aria-hidden': 'true' }, full)),
        h('td', { class: 'num' }, `${whole.format(limit.used)} used`), h('td', { class: 'num' }, `${whole.format(limit.remaining)} left`), h('td', { class: 'num quiet' }, limit.grows_in_s === null ? 'unused' : `more in ${limit.grows_in_s < 10 ? took(limit.grows_in_s) : lasting(limit.grows_in_s)}`));
    };
    return [h('p', {}, h('strong', {}, key.shadow ? `${verdict} (A shadow policy refuses nobody.)` : verdict), ' ', h('code', { class: 'wrap' }, key.key)),
      h('div', { class: 'scroll' }, h('table', { class: 'stand' }, h('caption', { class: 'unseen' }, 'Where it stands'), h('tbody', {}, key.limits.map(row))))];
  }

  /** Two steps: nobody gives back a quota by a slip. */
  resetter(values) {
    const host = h('p', { class: 'line' });
    const first = h('button', { type: 'button', onclick: () => { fill(host, 'Give back the whole quota?', sure, no); sure.focus(); } }, 'Reset this key…');
    const sure = h('button', { type: 'button', class: 'main', onclick: () => this.reset(values) }, 'Reset it');
    const no = h('button', { type: 'button', onclick: () => { fill(host, first); first.focus(); } }, 'No');
    fill(host, first);
    return host;
  }

  async reset(values) {
    try {
      const told = await this.ask(this.target(values), 'DELETE');
      await this.lookUp(values, h('p', {}, h('strong', {}, `✓ Reset: ${many(told.counters_forgotten, 'counter')} forgotten.`)));
    } catch (error) {
      if (error.status === 401 && (await this.needToken())) { await this.reset(values); return; }
      fill(this.answer, h('p', { class: 'error' }, error.message), this.resetter(values));
    }
  }
}
