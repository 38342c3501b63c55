'use strict';
// What all parts of the page use: elements, words for numbers and times, and the decisions with their looks.
//
// Every value goes into the page as text. There is no innerHTML anywhere: the policy that the page is served with
// (require-trusted-types-for) would refuse it.

const $ = (id) => document.getElementById(id);

/** An element. `with_` holds attributes, `on…` listeners and `class`; `undefined`, `null` and `false` leave out. */
function h(tag, with_, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(with_ ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

function svg(tag, with_, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(with_ ?? {})) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
}

/** Writes only what has changed: what has the focus, or is being selected, stays. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes a parent's children those of `items`, keeping the nodes of those that were there before. */
function keyed(parent, items, keyOf, create, update) {
  const had = parent.kept ?? new Map();
  const kept = new Map();
  items.forEach((item, at) => {
    const key = keyOf(item);
    const node = had.get(key) ?? create(item);
    update(node, item);
    kept.set(key, node);
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
  });
  for (const node of [...parent.children].slice(items.length)) node.remove();
  parent.kept = kept;
}

// Numbers and times.

const whole = new Intl.NumberFormat('en');
const few = new Intl.NumberFormat('en', { maximumSignificantDigits: 3, notation: 'compact' });
const clock = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
const hour = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
const dated = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium' });

/** In KiB or MiB, or what fits. */
const bytes = (n) => { const power = n < 1024 ? 0 : n < 1024 ** 2 ? 1 : n < 1024 ** 3 ? 2 : 3; return `${few.format(n / 1024 ** power)} ${['B', 'KiB', 'MiB', 'GiB'][power]}`; };
/** 1,234 in full, 12.3K from ten thousand on. */
const count = (n) => (n < 10000 ? whole.format(Math.round(n)) : few.format(n));
/** Per second: 0, 0.2, 3.5, 120, 12.3K. */
const rate = (n) => (n === 0 ? '0' : n < 0.05 ? '<0.1' : n < 10 ? n.toFixed(1) : count(n));
const many = (n, one, more) => `${count(n)} ${n === 1 ? one : more ?? `${one}s`}`;
const at = (s) => clock.format(s * 1000);

/** A part of a whole in percent; never 0 % or 100 % for what is not. */
function share(part, all) {
  if (!all) return '–';
  const percent = (100 * part) / all;
  if (part > 0 && percent < 0.1) return '<0.1 %';
  if (part < all && percent > 99.9) return '>99.9 %';
  return `${percent < 10 && part > 0 ? percent.toFixed(1) : Math.round(percent)} %`;
}

/** 85 µs, 1.2 ms, 340 ms, 2 s. */
function took(s) {
  if (s === null || s === undefined) return '–';
  const [n, unit] = s < 0.001 ? [s * 1e6, 'µs'] : s < 1 ? [s * 1000, 'ms'] : [s, 's'];
  return `${n < 10 && n % 1 ? n.toFixed(1) : Math.round(n)} ${unit}`;
}

/** 4 s, 12 min, 3 h 5 min, 2 d 4 h. */
function lasting(s) {
  s = Math.max(0, Math.round(s));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A moment that says how long ago it was, and goes on saying so. `off` is how far the instance's clock is ahead. */
function ago(s, off = 0) {
  const node = h('time', { datetime: new Date(s * 1000).toISOString(), title: dated.format(s * 1000), 'data-at': s, 'data-off': off });
  age(node);
  return node;
}
function age(node) {
  const past = Date.now() / 1000 + Number(node.dataset.off) - Number(node.dataset.at);
  say(node, past < 2 ? 'just now' : `${lasting(past)} ago`);
}
setInterval(() => document.querySelectorAll('time[data-at]').forEach(age), 1000);

// Decisions: what they are called, and how they look.

/** From the bottom of a stack to its top. `line` is how the pattern runs, as in the style sheet. */
const DECISIONS = [
  { id: 'allowed', word: 'allowed', line: '' },
  { id: 'exempt', word: 'exempt', line: '.' },
  { id: 'delayed', word: 'delayed', line: '.' },
  { id: 'shadow_rejected', word: 'shadow-rejected', line: '/' },
  { id: 'degraded', word: 'degraded', line: '-' },
  { id: 'rejected', word: 'rejected', line: '/' },
  { id: 'blocked', word: 'blocked', line: '\\' },
  { id: 'denied', word: 'denied', line: 'x' },
  { id: 'malformed', word: 'malformed', line: '|' },
];
/** What was refused; the last is a part of what is degraded, and not in DECISIONS. */
const REFUSED = ['rejected', 'blocked', 'denied', 'degraded_refused'];
const swatch = (id) => h('span', { class: `swatch d d-${id}`, 'aria-hidden': 'true' });
const sum = (numbers) => (numbers ?? []).reduce((all, n) => all + n, 0);
const refusedOf = (counts) => REFUSED.reduce((all, id) => all + (counts[id] ?? 0), 0);
const allOf = (counts) => DECISIONS.reduce((all, { id }) => all + (counts[id] ?? 0), 0);
