'use strict';
// The overrides of single keys of a policy: list, set and remove.

/** Most overrides that the panel lists. */
const MAX_SHOWN_OVERRIDES = 50;

/** What an override does, in words. */
function describeOverride(override) {
  if (override.blocked) return 'blocked';
  if (override.unlimited) return 'unlimited';
  return Object.entries(override.limits ?? {}).map(([name, { requests, burst }]) => `${name} ${integerFormat.format(requests)}${burst === undefined ? '' : `, bursts of ${integerFormat.format(burst)}`}`).join('; ');
}

/** The panel of one policy. `request` calls the admin API; `requestToken` prompts for a token. */
class OverridePanel {
  constructor(request, requestToken, policy) {
    Object.assign(this, { request, requestToken, policy, list: createElement('div', { class: 'scroll' }), result: createElement('div', { class: 'answer', role: 'status' }) });
    this.path = `/overrides/${encodeURIComponent(policy.name)}`;
    const textInput = (options) => createElement('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off', ...options });
    const option = (value, label) => createElement('option', { value }, label);
    this.values = (policy.key ?? []).map(() => textInput());
    this.kind = createElement('select', {}, (policy.limits ?? []).map((limit) => option(`limit:${limit.name}`, `Limit ${limit.name}`)), option('unlimited', 'Unlimited'), option('blocked', 'Blocked'));
    this.requests = createElement('input', { type: 'number', min: '0', step: '1' });
    this.expires = textInput({ placeholder: 'never, or 30d' });
    this.note = textInput();
    const field = (label, input) => createElement('label', {}, label, input);
    const submit = (event) => { event.preventDefault(); this.change(() => this.request(this.path, 'PUT', this.readForm()), 'Set.'); };
    this.element = createElement('div', {}, this.list,
      createElement('form', { onsubmit: submit },
        createElement('div', { class: 'fields' }, (policy.key ?? []).map((description, n) => field(description, this.values[n])), field('Override', this.kind), field('Requests', this.requests), field('Expires', this.expires), field('Note', this.note)),
        createElement('button', { type: 'submit' }, 'Set the override'), this.result));
    this.load();
  }

  readForm() {
    const body = { key: this.values.map((input) => input.value) };
    const [kind, limit] = this.kind.value.split(':');
    if (kind === 'limit') body.limits = { [limit]: { requests: Number(this.requests.value) } };
    else body[kind] = true;
    if (this.expires.value.trim()) body.expires = this.expires.value.trim();
    if (this.note.value.trim()) body.note = this.note.value.trim();
    return body;
  }

  async load() {
    try {
      const { overrides, more } = await this.request(`${this.path}?n=${MAX_SHOWN_OVERRIDES}`);
      const row = (override) => createElement('tr', {}, createElement('th', { scope: 'row' }, createElement('code', { class: 'wrap' }, override.key.join(' / ') || '(no key)')), createElement('td', {}, describeOverride(override)),
        createElement('td', { class: 'quiet' }, [override.expires_at && `until ${override.expires_at}`, override.author, override.note].filter(Boolean).join(', ')),
        createElement('td', {}, createElement('button', { type: 'button', onclick: () => this.remove(override.key) }, 'Remove')));
      replaceChildren(this.list, overrides.length === 0 ? createElement('p', { class: 'quiet' }, 'No key has an override.')
        : createElement('table', {}, createElement('caption', { class: 'unseen' }, 'Overrides'), createElement('tbody', {}, overrides.map(row))), more && createElement('p', { class: 'quiet' }, 'There are more: tidegate overrides list.'));
    } catch (error) {
      replaceChildren(this.list, createElement('p', { class: 'error' }, error.message));
    }
  }

  remove(key) {
    const query = new URLSearchParams(key.map((value) => ['key', value]));
    return this.change(() => this.request(`${this.path}?${query}`, 'DELETE'), 'Removed.');
  }

  async change(send, done) {
    try {
      await send();
      replaceChildren(this.result, createElement('p', {}, createElement('strong', {}, `✓ ${done}`)));
      await this.load();
    } catch (error) {
      if (error.status === 401 && (await this.requestToken())) { await this.change(send, done); return; }
      replaceChildren(this.result, createElement('p', { class: 'error' }, error.message));
    }
  }
}
