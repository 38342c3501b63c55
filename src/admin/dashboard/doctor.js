'use strict';
// The examination of the store (GET /doctor), on demand.

const FINDING_LEVELS = { fault: '✕ Fault', warning: '! Warning', unknown: '? No result', ok: '✓ OK' };

/** Examines the store when the button is pressed. `request` calls the admin API. */
function setUpDoctor(request) {
  const [button, result] = [$('doctor-run'), $('doctor')];
  button.addEventListener('click', async () => {
    button.disabled = true;
    replaceChildren(result, createElement('p', { class: 'quiet' }, 'Examining…'));
    try {
      replaceChildren(result, renderDoctorReport(await request('/doctor')));
    } catch (error) {
      replaceChildren(result, createElement('p', { class: 'error' }, error.message));
    }
    button.disabled = false;
  });
}

function renderDoctorReport(report) {
  const ofLevel = (...levels) => report.findings.filter(({ level }) => levels.includes(level));
  const [problems, fine] = [[...ofLevel('fault'), ...ofLevel('warning'), ...ofLevel('unknown')], ofLevel('ok')];
  const summary = problems.length === 0 ? '✓ No problem was found' : [pluralize(report.faults, 'fault'), pluralize(report.warnings, 'warning'), report.unknown > 0 && `${pluralize(report.unknown, 'check')} without a result`].filter(Boolean).join(', ');
  return [
    createElement('p', {}, createElement('strong', {}, summary), ', ', createRelativeTime(report.checked_at_s)),
    problems.length > 0 && createFindingList('Problems', problems),
    fine.length > 0 && createElement('details', { class: 'as-table', open: problems.length === 0 }, createElement('summary', {}, pluralize(fine.length, 'check without a problem', 'checks without a problem')), createFindingList('Checks without a problem', fine)),
    report.policies.length > 0 && createElement('details', { class: 'as-table' }, createElement('summary', {}, 'Memory by policy'), createMemoryTable(report.policies)),
  ];
}

function createFindingList(label, findings) {
  const item = ({ level, check, server, found, advice }) => createElement('li', {},
    createElement('strong', {}, `${FINDING_LEVELS[level] ?? level}: ${check}`), server && createElement('span', { class: 'quiet' }, ` ${server}`),
    createElement('div', {}, found), advice && createElement('div', { class: 'quiet' }, advice));
  return createElement('ul', { class: 'findings', 'aria-label': label }, findings.map(item));
}

function createMemoryTable(policies) {
  const caption = 'Memory by policy, estimated from a sample';
  const row = ({ policy, counters, bytes }) => createElement('tr', {},
    createElement('th', { scope: 'row' }, policy ?? '(long keys)'), createElement('td', { class: 'num' }, formatCount(counters)), createElement('td', { class: 'num' }, formatBytes(bytes)));
  const head = createElement('tr', {}, createElement('th', { scope: 'col' }, 'Policy'), ['Counters', 'Memory'].map((column) => createElement('th', { scope: 'col', class: 'num' }, column)));
  return createElement('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
    createElement('table', {}, createElement('caption', { class: 'unseen' }, caption), createElement('thead', {}, head), createElement('tbody', {}, policies.map(row))));
}
