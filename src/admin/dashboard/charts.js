'use strict';
// Stacked bars over time, drawn by uPlot, and the small pictures beside policies.

const isDark = matchMedia('(prefers-color-scheme: dark)');
const charts = new Set();
isDark.addEventListener('change', () => charts.forEach((chart) => chart.redraw()));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The pattern of a decision, as in the style sheet: nothing is told by colour alone. */
function pattern(context, { id, line }) {
  const tile = document.createElement('canvas');
  const size = 8 * devicePixelRatio;
  tile.width = tile.height = size;
  const draw = tile.getContext('2d');
  draw.fillStyle = colour(id);
  draw.fillRect(0, 0, size, size);
  draw.strokeStyle = draw.fillStyle = colour('stripe');
  draw.lineWidth = 1.6 * devicePixelRatio;
  const stroke = (...points) => {
    draw.beginPath();
    points.forEach(([x, y], n) => (n % 2 ? draw.lineTo(x * size, y * size) : draw.moveTo(x * size, y * size)));
    draw.stroke();
  };
  const rising = [[-0.25, 0.25], [0.25, -0.25], [-0.25, 1.25], [1.25, -0.25], [0.75, 1.25], [1.25, 0.75]];
  if (line === '/' || line === 'x') stroke(...rising);
  if (line === '\\' || line === 'x') stroke(...rising.map(([x, y]) => [1 - x, y]));
  if (line === '-') stroke([0, 0.5], [1, 0.5]);
  if (line === '|') stroke([0.5, 0], [0.5, 1]);
  if (line === '.') [[0.25, 0.25], [0.75, 0.75]].forEach(([x, y]) => { draw.beginPath(); draw.arc(x * size, y * size, size / 9, 0, 7); draw.fill(); });
  return context.createPattern(tile, 'repeat');
}

/** Steps of an axis of counts: half a request is nothing to draw a line for. */
const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 13 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);

/** Bars of what was decided in each step of time, one on the other. */
class Stack {
  /** `label` says what the chart is to whoever can't see it; `value` writes a number. */
  constructor(host, label, value) {
    Object.assign(this, { host, label, value, shown: [] });
    this.note = h('p', { class: 'note', hidden: true });
    this.tip = h('div', { class: 'tip', hidden: true, 'aria-hidden': 'true' });
    host.append(this.note, this.tip);
    this.sizes = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.sizes.observe(host);
    charts.add(this);
  }

  size() {
    return { width: Math.max(200, this.host.clientWidth), height: this.host.clientHeight };
  }

  /** `times` are the starts of the steps, `step` seconds long; `columns` has numbers by decision. `note` is said where there is nothing. */
  set(times, step, columns, note) {
    const shown = DECISIONS.filter(({ id }) => columns[id]?.some((n) => n > 0));
    this.note.hidden = shown.length > 0;
    say(this.note, note);
    const sums = times.map(() => 0);
    const stacked = shown.map(({ id }) => columns[id].map((n, at) => (sums[at] += n)));
    Object.assign(this, { times, step, columns });
    // Middles of steps; the tallest first, so that each bar hides the lower part of the one before.
    const data = [times.map((s) => s + step / 2), ...stacked.reverse()];
    const is_other = shown.map(({ id }) => id).join() !== this.shown.map(({ id }) => id).join();
    if (is_other || !this.plot) {
      this.shown = shown;
      this.build(data);
    } else {
      this.plot.setData(data);
    }
    this.plot.setScale('x', { min: times[0], max: times[times.length - 1] + step });
    this.host.querySelector('.uplot')?.setAttribute('aria-label', this.label(shown, columns));
  }

  build(data) {
    this.plot?.destroy();
    const bars = uPlot.paths.bars({ size: [0.86, 64], radius: 0 });
    const axis = { stroke: colour('quiet'), font: '11px system-ui, sans-serif', ticks: { show: false } };
    const two = (n) => String(n).padStart(2, '0');
    const time = (s) => { const d = new Date(s * 1000); return this.step < 60 ? `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}` : `${two(d.getHours())}:${two(d.getMinutes())}`; };
    // A label without room for either of its halves would be cut off, or lie on the other axis' zero.
    const label = (plot, s) => {
      const [text, x] = [time(s), plot.valToPos(s, 'x')];
      const half = text.length * 3.2;
      return x < half || x > plot.over.clientWidth - half ? '' : text;
    };
    this.plot = new uPlot({
      ...this.size(),
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: true, auto: false }, y: { range: (_, __, most) => [0, Math.max(1, most * 1.08)] } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 84, values: (plot, splits) => splits.map((s) => label(plot, s)) },
        { ...axis, grid: { stroke: colour('edge'), width: 1 }, size: 48, space: 40, incrs: WHOLE, values: (_, splits) => splits.map((n) => few.format(n)) },
      ],
      series: [{}, ...this.shown.toReversed().map((decision) => ({ fill: (plot) => pattern(plot.ctx, decision), width: 0, paths: bars, points: { show: false } }))],
      hooks: { setCursor: [(plot) => this.point(plot.cursor)] },
    }, data, this.host);
    this.plot.root.setAttribute('role', 'img');
  }

  point({ idx, left }) {
    this.tip.hidden = idx === null || idx === undefined || left < 0 || this.shown.length === 0;
    if (this.tip.hidden) return;
    const line = ({ id, word }) => h('p', {}, swatch(id), word, h('span', { class: 'n' }, this.value(this.columns[id][idx])));
    fill(this.tip, h('p', { class: 'quiet' }, at(this.times[idx])), this.shown.toReversed().map(line));
    const room = this.host.clientWidth;
    const x = left + 56;
    this.tip.style.left = `${x + 190 < room ? x + 12 : Math.max(0, x - 170)}px`;
  }

  redraw() {
    if (!this.plot) return;
    this.build(this.plot.data);
    this.plot.setScale('x', { min: this.times[0], max: this.times[this.times.length - 1] + this.step });
  }

  end() {
    charts.delete(this);
    this.sizes.disconnect();
    this.plot?.destroy();
  }
}

/** The numbers of a chart for whoever can't see it, or wants them: newest first. */
function asTable(caption, times, columns, write) {
  const shown = DECISIONS.filter(({ id }) => columns[id]?.some((n) => n > 0));
  if (shown.length === 0) return h('p', { class: 'quiet' }, 'There is nothing in this time.');
  const row = (s, at_) => h('tr', {}, h('th', { scope: 'row' }, at(s)), shown.map(({ id }) => h('td', { class: 'num' }, write(columns[id][at_]))));
  return h('table', {}, h('caption', { class: 'unseen' }, caption),
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'From'), shown.map(({ word }) => h('th', { scope: 'col', class: 'num' }, word)))),
    h('tbody', {}, times.map(row).reverse()));
}

/** What a policy did by minute: all of it, and in front what it refused. */
function spark() {
  return svg('svg', { class: 'spark', viewBox: '0 0 120 30', preserveAspectRatio: 'none', role: 'img' },
    svg('path', { class: 'base', d: 'M0 29.5H120', fill: 'none' }), svg('path', { class: 'all' }), svg('path', { class: 'refused' }));
}
function drawSpark(node, all, refused) {
  const most = Math.max(1, ...all);
  const bars = (numbers) => numbers.map((n, at) => (n ? `M${at * 2} 30v${-Math.max(1.5, (29 * n) / most).toFixed(1)}h1.6V30z` : '')).join('');
  const [, whole_, part] = node.children;
  whole_.setAttribute('d', bars(all));
  part.setAttribute('d', bars(refused));
  node.setAttribute('aria-label', `At most ${count(most)} a minute; refused in ${many(refused.filter((n) => n > 0).length, 'minute')} of the last ${all.length}`);
}

/** One bar, cut by decision. */
function drawBar(node, counts) {
  const all = allOf(counts);
  fill(node, DECISIONS.filter(({ id }) => counts[id] > 0).map(({ id }) => {
    const part = h('span', { class: `d d-${id}` });
    part.style.flexGrow = String(counts[id] / all);
    return part;
  }));
  const words = DECISIONS.filter(({ id }) => counts[id] > 0).map(({ id, word }) => `${count(counts[id])} ${word}`).join(', ');
  node.setAttribute('aria-label', words || 'nothing');
  node.title = words;
}
