'use strict';
// The fleet: the instances that share the limits, and what all of them refused together.

/** Renders the section. It is hidden if other instances cannot share the limits. */
function drawFleet({ fleet }, modes, open) {
  $('fleet-card').hidden = !fleet?.shared;
  if (!fleet?.shared) return;
  const silent = fleet.instances.filter((instance) => instance.not_asked).length;
  setText($('fleet-count'), `${pluralize(fleet.total, 'instance')}, ${formatRate(fleet.decisions_per_s)} decisions per second${silent ? `; ${formatCount(silent)} did not answer` : ''}`);
  $('fleet-problem').hidden = !fleet.problem;
  setText($('fleet-problem'), fleet.problem ? `The heartbeats could not be read, so the list may be old: ${fleet.problem}` : '');
  reconcileChildren($('fleet').tBodies[0], fleet.instances, ({ id }) => id, ({ id, self }) => {
    const name = createElement('th', { scope: 'row', class: 'wrap', title: id }, createElement('span', { class: 'mono' }), self && createElement('span', { class: 'badge' }, 'this page'));
    const cells = ['wrap', 'num', 'num', 'wide', 'wrap'].map((kind) => createElement('td', { class: kind }));
    return createElement('tr', {}, name, cells);
  }, (row, instance) => {
    setText(row.children[0].firstChild, instance.name ?? instance.id.slice(0, 8));
    const state = instance.store === 'degraded' ? `${instance.state}, store degraded` : instance.state;
    const admin = instance.not_asked ? `No answer: ${instance.not_asked}` : instance.admin ?? '–';
    const values = [state, instance.decisions_per_s === null ? '–' : formatRate(instance.decisions_per_s), formatPercent(instance.share, 1), instance.version ?? '–', admin];
    values.forEach((value, index) => setText(row.children[index + 1], value));
    row.lastChild.classList.toggle('quiet', Boolean(instance.not_asked));
  });
  // The tables of a single instance are on the page already.
  $('fleet-rankings').hidden = fleet.total <= 1;
  drawRanking($('fleet-keys'), fleet.keys, 'key', 'No key was refused recently.', modes, open);
  drawRanking($('fleet-paths'), fleet.paths, 'path', 'No path was refused recently.', modes);
}
