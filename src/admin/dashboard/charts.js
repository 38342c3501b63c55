'use strict';
// Stacked bar charts over time, drawn by uPlot, and the sparklines of policies.

const isDark = matchMedia('(prefers-color-scheme: dark)');
const charts = new Set();
isDark.addEventListener('change', () => charts.forEach((chart) => chart.redraw()));

const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Creates the fill pattern of a decision, as in style.css. No meaning depends on colour alone. */
function createPattern(context, { id, line }) {
  const tile = document.createElement('canvas');
  const size = 8 * devicePixelRatio;
  tile.width = tile.height = size;
  const draw = tile.getContext('2d');
  draw.fillStyle = themeColour(id);
  draw.fillRect(0, 0, size, size);
  draw.strokeStyle = draw.fillStyle = themeColour('stripe');
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

/** Increments of a count axis: whole numbers only. */
const WHOLE_STEPS = [1, 2, 5].flatMap((n) => Array.from({ length: 13 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);

/** Stacked bars of the decisions in each time step. */
class StackedBarChart {
  /** `label` returns the accessible name of the chart; `value` formats a number. */
  constructor(host, label, value) {
    Object.assign(this, { host, label, value, shown: [] });
    this.note = createElement('p', { class: 'note', hidden: true });
    this.tip = createElement('div', { class: 'tip', hidden: true, 'aria-hidden': 'true' });
    host.append(this.note, this.tip);
    this.sizes = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.sizes.observe(host);
    charts.add(this);
  }

  size() {
    return { width: Math.max(200, this.host.clientWidth), height: this.host.clientHeight };
  }

  /**
   * Sets the data. `times` are the starts of the steps, `step` is their length in seconds, and
   * `columns` holds the numbers by decision. `note` is shown if there are none.
   */
  set(times, step, columns, note) {
    const shown = DECISIONS.filter(({ id }) => columns[id]?.some((n) => n > 0));
    this.note.hidden = shown.length > 0;
    setText(this.note, note);
    const sums = times.map(() => 0);
    const stacked = shown.map(({ id }) => columns[id].map((n, index) => (sums[index] += n)));
    Object.assign(this, { times, step, columns });
    // x values are the middles of the steps. The tallest series comes first, so that each later bar
    // covers the lower part of the earlier one.
    const data = [times.map((s) => s + step / 2), ...stacked.reverse()];
    const hasNewSeries = shown.map(({ id }) => id).join() !== this.shown.map(({ id }) => id).join();
    if (hasNewSeries || !this.plot) {
      this.shown = shown;
      this.build(data);
    } else {
      this.plot.setData(data);
      this.plot.setScale('x', this.span());
    }
    this.host.querySelector('.uplot')?.setAttribute('aria-label', this.label(shown, columns));
  }

  /** The range of the time axis. A new plot needs it at once: set later, its labels are missing. */
  span() {
    return { min: this.times[0], max: this.times[this.times.length - 1] + this.step };
  }

  build(data) {
    this.plot?.destroy();
    const bars = uPlot.paths.bars({ size: [0.86, 64], radius: 0 });
    const axis = { stroke: themeColour('quiet'), font: '11px system-ui, sans-serif', ticks: { show: false } };
    const twoDigits = (n) => String(n).padStart(2, '0');
    const time = (s) => { const d = new Date(s * 1000); return this.step < 60 ? `${twoDigits(d.getHours())}:${twoDigits(d.getMinutes())}:${twoDigits(d.getSeconds())}` : `${twoDigits(d.getHours())}:${twoDigits(d.getMinutes())}`; };
    // Omits a label that would be cut off at the edge or overlap the zero of the other axis.
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
      scales: { x: { time: true, auto: false, ...this.span() }, y: { range: (_, __, most) => [0, Math.max(1, most * 1.08)] } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 84, values: (plot, splits) => splits.map((s) => label(plot, s)) },
        { ...axis, grid: { stroke: themeColour('edge'), width: 1 }, size: 48, space: 40, incrs: WHOLE_STEPS, values: (_, splits) => splits.map((n) => compactFormat.format(n)) },
      ],
      series: [{}, ...this.shown.toReversed().map((decision) => ({ fill: (plot) => createPattern(plot.ctx, decision), width: 0, paths: bars, points: { show: false } }))],
      hooks: { setCursor: [(plot) => this.point(plot.cursor)] },
    }, data, this.host);
    this.plot.root.setAttribute('role', 'img');
  }

  point({ idx, left }) {
    this.tip.hidden = idx === null || idx === undefined || left < 0 || this.shown.length === 0;
    if (this.tip.hidden) return;
    const line = ({ id, label }) => createElement('p', {}, createSwatch(id), label, createElement('span', { class: 'n' }, this.value(this.columns[id][idx])));
    replaceChildren(this.tip, createElement('p', { class: 'quiet' }, formatTime(this.times[idx])), this.shown.toReversed().map(line));
    const width = this.host.clientWidth;
    const x = left + 56;
    this.tip.style.left = `${x + 190 < width ? x + 12 : Math.max(0, x - 170)}px`;
  }

  redraw() {
    if (!this.plot) return;
    this.build(this.plot.data);
  }

  destroy() {
    charts.delete(this);
    this.sizes.disconnect();
    this.plot?.destroy();
  }
}

/** Creates a table with the numbers of a chart, newest first. */
function createDataTable(caption, times, columns, format) {
  const shown = DECISIONS.filter(({ id }) => columns[id]?.some((n) => n > 0));
  if (shown.length === 0) return createElement('p', { class: 'quiet' }, 'No data in this period.');
  const row = (s, index) => createElement('tr', {}, createElement('th', { scope: 'row' }, formatTime(s)), shown.map(({ id }) => createElement('td', { class: 'num' }, format(columns[id][index]))));
  return createElement('table', {}, createElement('caption', { class: 'unseen' }, caption),
    createElement('thead', {}, createElement('tr', {}, createElement('th', { scope: 'col' }, 'From'), shown.map(({ label }) => createElement('th', { scope: 'col', class: 'num' }, label)))),
    createElement('tbody', {}, times.map(row).reverse()));
}

/** Creates a sparkline of a policy by minute: all decisions, with the refusals in front. */
function createSparkline() {
  return createSvg('svg', { class: 'spark', viewBox: '0 0 120 30', preserveAspectRatio: 'none', role: 'img' },
    createSvg('path', { class: 'base', d: 'M0 29.5H120', fill: 'none' }), createSvg('path', { class: 'all' }), createSvg('path', { class: 'refused' }));
}
/** Updates a sparkline. `all` and `refused` are numbers by minute. */
function drawSparkline(node, all, refused) {
  const most = Math.max(1, ...all);
  const bars = (numbers) => numbers.map((n, index) => (n ? `M${index * 2} 30v${-Math.max(1.5, (29 * n) / most).toFixed(1)}h1.6V30z` : '')).join('');
  const [, allPath, refusedPath] = node.children;
  allPath.setAttribute('d', bars(all));
  refusedPath.setAttribute('d', bars(refused));
  node.setAttribute('aria-label', `Maximum ${formatCount(most)} per minute; refusals in ${pluralize(refused.filter((n) => n > 0).length, 'minute')} of the last ${all.length}`);
}

/** Draws one bar, divided by decision. */
function drawBar(node, counts) {
  const all = sumAll(counts);
  replaceChildren(node, DECISIONS.filter(({ id }) => counts[id] > 0).map(({ id }) => {
    const segment = createElement('span', { class: `d d-${id}` });
    segment.style.flexGrow = String(counts[id] / all);
    return segment;
  }));
  const summary = DECISIONS.filter(({ id }) => counts[id] > 0).map(({ id, label }) => `${formatCount(counts[id])} ${label}`).join(', ');
  node.setAttribute('aria-label', summary || 'no decisions');
  node.title = summary;
}
