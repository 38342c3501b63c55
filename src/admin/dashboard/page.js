'use strict';
// Shared helpers: DOM elements, number and time formats, and the list of decisions.
//
// Every value is inserted as text. The content security policy of the page
// (require-trusted-types-for) forbids innerHTML.

const $ = (id) => document.getElementById(id);

/**
 * Creates an element. `attributes` holds attributes and `on…` listeners.
 * Attributes and children that are `undefined`, `null` or `false` are omitted.
 */
function createElement(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

/** Creates an SVG element. */
function createSvg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Replaces all children of a node. Omits `undefined`, `null` and `false`. */
function replaceChildren(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
}

/** Sets the text of a node if it differs, so that focus and selection survive a refresh. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of `parent` match `items`. Reuses the nodes of items with a known key. */
function reconcileChildren(parent, items, keyOf, create, update) {
  const previous = parent.nodesByKey ?? new Map();
  const nodes = new Map();
  items.forEach((item, index) => {
    const key = keyOf(item);
    const node = previous.get(key) ?? create(item);
    update(node, item);
    nodes.set(key, node);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  for (const node of [...parent.children].slice(items.length)) node.remove();
  parent.nodesByKey = nodes;
}

// Number and time formats.

const integerFormat = new Intl.NumberFormat('en');
const compactFormat = new Intl.NumberFormat('en', { maximumSignificantDigits: 3, notation: 'compact' });
const timeFormat = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
const hourFormat = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
const dateTimeFormat = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium' });

/** Formats a number of bytes in B, KiB, MiB or GiB. */
const formatBytes = (n) => { const power = n < 1024 ? 0 : n < 1024 ** 2 ? 1 : n < 1024 ** 3 ? 2 : 3; return `${compactFormat.format(n / 1024 ** power)} ${['B', 'KiB', 'MiB', 'GiB'][power]}`; };
/** Formats a count: 1,234 in full, 12.3K from 10,000 on. */
const formatCount = (n) => (n < 10000 ? integerFormat.format(Math.round(n)) : compactFormat.format(n));
/** Formats a rate per second: 0, 0.2, 3.5, 120, 12.3K. */
const formatRate = (n) => (n === 0 ? '0' : n < 0.05 ? '<0.1' : n < 10 ? n.toFixed(1) : formatCount(n));
/** Formats a count with its noun: 1 key, 2 keys. */
const pluralize = (n, singular, plural) => `${formatCount(n)} ${n === 1 ? singular : plural ?? `${singular}s`}`;
/** Formats a Unix time in seconds as a time of day. */
const formatTime = (s) => timeFormat.format(s * 1000);

/** Formats a ratio in percent. Shows 0 % and 100 % only if they are exact. */
function formatPercent(part, all) {
  if (!all) return '–';
  const percent = (100 * part) / all;
  if (part > 0 && percent < 0.1) return '<0.1 %';
  if (part < all && percent > 99.9) return '>99.9 %';
  return `${percent < 10 && part > 0 ? percent.toFixed(1) : Math.round(percent)} %`;
}

/** Formats a latency in seconds: 85 µs, 1.2 ms, 340 ms, 2 s. */
function formatLatency(s) {
  if (s === null || s === undefined) return '–';
  const [n, unit] = s < 0.001 ? [s * 1e6, 'µs'] : s < 1 ? [s * 1000, 'ms'] : [s, 's'];
  return `${n < 10 && n % 1 ? n.toFixed(1) : Math.round(n)} ${unit}`;
}

/** Formats a duration in seconds: 4 s, 12 min, 3 h 5 min, 2 d 4 h. */
function formatDuration(s) {
  s = Math.max(0, Math.round(s));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/**
 * Creates a `time` element that shows its age and updates it every second.
 * `clockOffset` is how many seconds the clock of the instance is ahead of the browser's.
 */
function createRelativeTime(s, clockOffset = 0) {
  const node = createElement('time', { datetime: new Date(s * 1000).toISOString(), title: dateTimeFormat.format(s * 1000), 'data-at': s, 'data-off': clockOffset });
  updateRelativeTime(node);
  return node;
}
function updateRelativeTime(node) {
  const past = Date.now() / 1000 + Number(node.dataset.off) - Number(node.dataset.at);
  setText(node, past < 2 ? 'just now' : `${formatDuration(past)} ago`);
}
setInterval(() => document.querySelectorAll('time[data-at]').forEach(updateRelativeTime), 1000);

/**
 * Decodes percent-encoded letters outside ASCII, such as %C3%BC. Other bytes stay encoded: separators, control and
 * format characters, spaces and invalid UTF-8.
 */
function decodeNonAscii(text) {
  return text.replace(/(?:%[89A-F][0-9A-F])+/gi, (encoded) => {
    try {
      const decoded = decodeURIComponent(encoded);
      return /[\p{C}\p{Z}]/u.test(decoded) ? encoded : decoded;
    } catch {
      return encoded; // not valid UTF-8
    }
  });
}

// Decisions with their names and patterns.

/** All decisions, in stacking order from the bottom. `line` is the pattern, as in style.css. */
const DECISIONS = [
  { id: 'allowed', label: 'allowed', line: '' },
  { id: 'exempt', label: 'exempt', line: '.' },
  { id: 'delayed', label: 'delayed', line: '.' },
  { id: 'shadow_rejected', label: 'shadow-rejected', line: '/' },
  { id: 'marked', label: 'marked', line: '-' },
  { id: 'degraded', label: 'admitted without the store', line: '-' },
  { id: 'degraded_refused', label: 'refused without the store', line: 'x' },
  { id: 'rejected', label: 'rejected', line: '/' },
  { id: 'blocked', label: 'blocked', line: '\\' },
  { id: 'denied', label: 'denied', line: 'x' },
  { id: 'malformed', label: 'malformed', line: '|' },
];
/** Decisions that refuse a request: what every number of refused requests on this page counts. */
const REFUSED = ['rejected', 'blocked', 'denied', 'degraded_refused'];
/** Takes the refused part of `degraded` out of it, in series as the API has them. */
function splitDegraded(series) {
  if (series?.degraded) series.degraded = series.degraded.map((n, index) => n - (series.degraded_refused?.[index] ?? 0));
  return series;
}
const createSwatch = (id) => createElement('span', { class: `swatch d d-${id}`, 'aria-hidden': 'true' });
const sum = (numbers) => (numbers ?? []).reduce((total, n) => total + n, 0);
const sumRefused = (counts) => REFUSED.reduce((total, id) => total + (counts[id] ?? 0), 0);
const sumAll = (counts) => DECISIONS.reduce((total, { id }) => total + (counts[id] ?? 0), 0);
