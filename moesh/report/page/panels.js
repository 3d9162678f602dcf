// Tables, experts, meshes.

function table(target, head, body) {
  target.replaceChildren();
  const add = (tag, cells, kind) => {
    const row = make('tr', ...cells.map((cell) => make(tag, cell)));
    if (kind) row.className = kind;
    target.append(row);
  };
  add('th', head);
  for (const {cells, kind} of body) add('td', cells, kind);
}

const last = (ys) => {
  for (let i = (ys || []).length - 1; i >= 0; --i)
    if (!Number.isNaN(ys[i])) return ys[i];
  return NaN;
};
function median(ys) {
  const sorted = Float64Array.from(ys || []).filter((y) => !Number.isNaN(y)).sort();
  return sorted.length ? sorted[sorted.length >> 1] : NaN;
}
const meshText = (mesh, names) =>
    names.filter((n) => mesh[n] > 1).map((n) => `${n}=${mesh[n]}`).join(' ') || '1 rank';
const DENSE = ['pp', 'dp_replicate', 'dp_shard', 'cp', 'tp'],
      SPARSE = ['pp', 'dp_replicate', 'efsdp', 'ep', 'etp'];

function showSummary() {
  const line = (name, f) => ({
    cells: [
      name, ...runs.map((r) => {
        try {
          return f(r, r.start);
        } catch {
          return '';
        }
      })
    ]
  });
  const number = (x) => (Number.isNaN(x) ? '' : exactly(x));
  table(byId('summary'), ['', ...runs.map((r) => r.name)], [
    line(
        'model',
        (r, s) => `${s.model}, ${s.parameters.toLocaleString('en')} parameters (${
            s.active_parameters.toLocaleString('en')} active)`),
    line(
        'mesh',
        (r, s) => s.ranks === 1 ?
            '1 rank' :
            `${s.ranks} ranks: ${meshText(s.mesh, DENSE)} | ${meshText(s.mesh, SPARSE)}`),
    line('steps', (r, s) => `${number(last(r.columns.step))} of ${s.steps.toLocaleString('en')}`),
    line('tokens', (r) => number(last(r.columns.tokens_total))),
    line(
        'tokens trained on',
        (r) => {
          const share = 100 * last(r.columns.trained_share);
          return Number.isNaN(share) ? '' : `${share.toFixed(1)} % of those in the last step`;
        }),
    line('loss', (r) => number(last(r.columns.loss))),
    ...(runs.some((r) => r.names('validation.').length) ?
            [line(
                'validation',
                (r) => r.names('validation.')
                           .map((n) => `${n.slice(11)}: ${number(last(r.columns[n]))}`)
                           .join(', '))] :
            []),
    line('tokens/s, median', (r) => number(Math.round(median(r.columns.tps)))),
    line(
        'memory',
        (r, s) => {
          const held = expectedMemory(s), of = s.device === 'cpu' ? 'the process' : 'the GPU';
          return `${number(last(r.columns.memory_gib))} GiB of ${of}` +
              (Number.isNaN(held) ? '' : `, ${held.toPrecision(3)} GiB as estimated`);
        }),
    line('skipped steps', (r) => number((r.columns.skipped || []).reduce((a, b) => a + b, 0))),
    line('device', (r, s) => [s.device, s.device_name].filter(Boolean).join(': ')),
    line(
        'host',
        (r, s) =>
            `${s.host}, ${s.processes} process${s.processes === 1 ? '' : 'es'}, ${s.cores} cores`),
    line('versions', (r, s) => `moesh ${s.moesh}, torch ${s.torch}`),
    line(
        'started',
        (r) => r.starts
                   .map(
                       (s) => new Date(1000 * s.time).toISOString().slice(0, 19).replace('T', ' ') +
                           (s.first_step ? ` (from step ${s.first_step})` : ''))
                   .join(', ')),
  ]);
}

// "key = value   # origin" below [section].
function configOf(run) {
  const found = new Map();
  let section = '', counts = {};
  for (const text of (run.start.config || '').split('\n')) {
    const heading = text.match(/^\[+([^\]]+)\]+$/);
    if (heading) {
      const isList = text.startsWith('[[');
      if (isList) counts[heading[1]] = (counts[heading[1]] ?? -1) + 1;
      section = isList ? `${heading[1]}.${counts[heading[1]]}` : heading[1];
    }
    const cut = text.lastIndexOf(' # ');
    const equals = text.indexOf(' = ');
    if (equals < 0 || cut < 0) continue;
    found.set(
        `${section}.${text.slice(0, equals)}`,
        {value: text.slice(equals + 3, cut).trim(), origin: text.slice(cut + 3)});
  }
  return found;
}

function showConfig() {
  const all = runs.map(configOf), keys = [...new Set(all.flatMap((c) => [...c.keys()]))];
  const isDefault = (o) =>
      o === undefined || o.origin === 'default' || /^[a-z0-9_]+:[a-z0-9_]+$/.test(o.origin);
  const body = [];
  for (const key of keys) {
    const values = all.map((c) => c.get(key));
    const differs = values.some((v) => v?.value !== values[0]?.value);
    if (byId('config-set').checked && !differs && values.every(isDefault)) continue;
    body.push({
      kind: differs ? 'differs' : '',
      cells: [
        key, ...values.map(
            (v) => make('span', v ? v.value : '', make('small', v ? '  ' + v.origin : '')))
      ]
    });
  }
  byId('config-section').hidden = all.every((c) => c.size === 0);
  table(byId('config'), ['', ...runs.map((r) => r.name)], body);
}

// Experts.

// 0 dark blue, the mean white, four times the mean dark red.
function heatColor(ratio) {
  const mix = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);
  if (ratio <= 1) return ratio === 0 ? [12, 18, 60] : mix([60, 110, 190], [248, 248, 248], ratio);
  return mix([248, 248, 248], [170, 20, 25], Math.min(1, Math.log(ratio) / Math.log(4)));
}

function frameAt(index) {
  return chosen().frames[index];
}
function showHeat() {
  const run = chosen(), canvas = byId('heat'), slider = byId('frame');
  byId('experts-section').hidden = runs.every((r) => r.frames.length === 0);
  slider.max = Math.max(0, run.frames.length - 1);
  const frame = frameAt(Number(slider.value));
  canvas.hidden = !frame;
  byId('frame-step').textContent = frame ? frame.step.toLocaleString('en') : 'none';
  if (!frame) return;
  canvas.width = frame.experts;
  canvas.height = frame.layers;
  canvas.style.height = Math.min(420, Math.max(60, frame.layers * 26)) + 'px';
  const context = canvas.getContext('2d'),
        image = context.createImageData(frame.experts, frame.layers);
  for (let l = 0; l < frame.layers; ++l) {
    const row = frame.counts.subarray(l * frame.experts, (l + 1) * frame.experts);
    const mean = row.reduce((a, b) => a + b, 0) / frame.experts;
    row.forEach(
        (n, e) => image.data.set(
            [...heatColor(mean > 0 ? n / mean : 0), 255], 4 * (l * frame.experts + e)));
  }
  context.putImageData(image, 0, 0);
}
function heatCell(event) {
  const frame = frameAt(Number(byId('frame').value)), box = byId('heat').getBoundingClientRect();
  if (!frame) return;
  const e = Math.min(
      frame.experts - 1, Math.floor((event.clientX - box.left) / box.width * frame.experts));
  const l =
      Math.min(frame.layers - 1, Math.floor((event.clientY - box.top) / box.height * frame.layers));
  const row = frame.counts.subarray(l * frame.experts, (l + 1) * frame.experts),
        sum = row.reduce((a, b) => a + b, 0);
  byId('heat-info').textContent = `MoE layer ${l}, expert ${e}: ${row[e].toLocaleString('en')} of ${
                                      sum.toLocaleString('en')} tokens, ` +
      `${sum ? (row[e] * frame.experts / sum).toFixed(2) : 0} times the mean`;
}

// The mesh in both views.

function coordinates(rank, mesh, names) {  // the last axis fastest
  const at = Object.fromEntries(names.map((name) => [name, 0]));
  for (const name of [...names].reverse()) {
    at[name] = rank % mesh[name];
    rank = Math.floor(rank / mesh[name]);
  }
  return at;
}
function meshView(title, mesh, names, ranks, numRowAxes) {
  const heading = make('h3', `${title}: ${names.map((n) => `${n} ${mesh[n]}`).join(' x ')}`);
  const rowAxes = names.slice(0, numRowAxes), columnAxes = names.slice(numRowAxes);
  const columns = columnAxes.reduce((n, a) => n * mesh[a], 1);
  const label = (at, axes) =>
      axes.filter((a) => mesh[a] > 1).map((a) => `${a} ${at[a]}`).join(', ');
  const head = make('tr', make('th'));
  for (let c = 0; c < Math.min(columns, ranks); ++c)
    head.append(make('th', label(coordinates(c, mesh, names), columnAxes)));
  const grid = make('table', head);
  for (let first = 0; first < ranks; first += columns) {
    const tr = make('tr', make('th', label(coordinates(first, mesh, names), rowAxes)));
    for (let rank = first; rank < Math.min(first + columns, ranks); ++rank) {
      const td = make('td', rank), at = coordinates(rank, mesh, names);
      const hue = 360 * at[names[names.length - 2]] / mesh[names[names.length - 2]],
            light = 92 - 22 * at[names[names.length - 1]] / mesh[names[names.length - 1]];
      td.style.background = `hsl(${hue} 60% ${light}%)`;
      td.dataset.rank = rank;
      tr.append(td);
    }
    grid.append(tr);
  }
  const box = make('div', heading, grid);
  box.className = 'view';
  return box;
}
function showMesh() {
  const {mesh, ranks} = chosen().start;
  byId('mesh-section').hidden = !mesh;
  if (!mesh) return;
  const shown = Math.min(ranks, 1024);
  const views = make(
      'div', meshView('dense', mesh, DENSE, shown, 3),
      meshView('sparse (routed experts)', mesh, SPARSE, shown, 3));
  views.className = 'views';
  byId('mesh').replaceChildren(views);
  if (shown < ranks) byId('mesh-info').textContent = `The first ${shown} of ${ranks} ranks.`;
}
function pointAtRank(event) {
  const {rank} = event.target.dataset;
  for (const td of byId('mesh').querySelectorAll('td'))
    td.classList.toggle('here', rank !== undefined && td.dataset.rank === rank);
  if (rank === undefined) return;
  const {mesh} = chosen().start,
        text = (names) => Object.entries(coordinates(Number(rank), mesh, names))
                              .filter(([n]) => mesh[n] > 1)
                              .map(([n, v]) => `${n} ${v}`)
                              .join(', ') ||
      'the only rank';
  byId('mesh-info').textContent =
      `Rank ${rank}: ${text(DENSE)}; for routed experts ${text(SPARSE)}`;
}

// The meshes of moesh verify --json.

function axesOf(text) {
  return Object.fromEntries(text.split(' ').filter((w) => w.includes('=')).map((w) => {
    const [n, v] = w.split('=');
    return [n, Number(v)];
  }));
}
function showVerify() {
  byId('verify-section').hidden = payload.verify.length === 0;
  for (const result of payload.verify) {
    const byRanks = new Map();
    for (const entry of result.meshes) {
      const axes = axesOf(entry.mesh), of = (names) => names.map((n) => axes[n] || 1);
      const ranks = of(DENSE).reduce((a, b) => a * b, 1);
      if (!byRanks.has(ranks)) byRanks.set(ranks, []);
      byRanks.get(ranks).push({
        entry,
        dense: meshText(axes, DENSE),
        sparse: meshText(axes, SPARSE.slice(1).filter((n) => n !== 'dp_replicate'))
      });
    }
    const held = result.meshes.filter((m) => m.holds).length;
    const title = make(
        'p',
        `${result.name}: ${held} of ${result.meshes.length} meshes hold, ${
            Number(result.seconds).toFixed(1)} s`);
    if (held < result.meshes.length) title.className = 'bad';
    const sorted = [...byRanks].sort((a, b) => a[0] - b[0]);
    const all = make('div', ...sorted.map(([ranks, entries]) => verifyMatrix(ranks, entries)));
    all.className = 'matrices';
    byId('verify').append(title, all);
  }
  if (payload.verify.length)
    byId('verify-info').textContent =
        'Rows: dense view; columns: routed experts. Green holds, the darker the nearer to ' +
        'what is allowed; red does not. Point at a mesh.';
}
function verifyMatrix(ranks, entries) {
  const rows = [...new Set(entries.map((e) => e.dense))],
        columns = [...new Set(entries.map((e) => e.sparse))];
  const line = make('tr', make('th'), ...columns.map((c) => make('th', c)));
  const grid = make('table', make('thead', line));
  grid.className = 'matrix';
  for (const r of rows) {
    const tr = make('tr', make('th', r));
    for (const c of columns) {
      const td = make('td'),
            found = entries.find((e) => e.dense === r && e.sparse === c)?.entry;
      if (found) {
        const nearness = found.worst > 0 ? Math.max(0, 1 + Math.log10(found.worst) / 9) : 0;
        td.style.background =
            found.holds ? `hsl(130 55% ${88 - 45 * Math.min(1, nearness)}%)` : 'hsl(355 75% 50%)';
        td.dataset.text =
            `${found.mesh || 'one rank'}: ${found.holds ? 'holds' : 'DOES NOT HOLD'}, worst error ${
                found.worst === null ? 'not finite' :
                                       Number(found.worst).toPrecision(2)} of what is allowed` +
            (found.worst_tensor ? `, in ${found.worst_tensor}` : '') +
            (found.first ? `; first that differs: ${found.first}` : '') +
            (found.error ? `; ${found.error}` : '');
      }
      tr.append(td);
    }
    grid.append(tr);
  }
  return make('div', make('h3', `${ranks} rank${ranks === 1 ? '' : 's'}`), grid);
}
