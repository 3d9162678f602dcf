// Curves: which there are, and what of their points is drawn.

// Exponential mean; gaps are left out.
function smoothed(ys, weight) {
  if (weight === 0) return ys;
  const out = new Float64Array(ys.length);
  let mean = NaN;
  for (let i = 0; i < ys.length; ++i) {
    if (!Number.isNaN(ys[i]))
      mean = Number.isNaN(mean) ? ys[i] : weight * mean + (1 - weight) * ys[i];
    out[i] = Number.isNaN(ys[i]) ? NaN : mean;
  }
  return out;
}

function lowerBound(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The points of a window, with one more on each side; without a window all.
function inWindow(xs, window) {
  if (!window) return [0, xs.length];
  const end = Math.min(xs.length, lowerBound(xs, window[1]) + 1);
  return [Math.max(0, lowerBound(xs, window[0]) - 1), end];
}

// The points of [begin, end) that a screen with this many columns can show: the least and the
// largest of each bucket, so that no peak is lost.
function thinned(ys, begin, end, buckets) {
  const kept = [], size = (end - begin) / buckets;
  if (size <= 2) {
    for (let i = begin; i < end; ++i)
      if (!Number.isNaN(ys[i])) kept.push(i);
    return kept;
  }
  for (let b = 0; b < buckets; ++b) {
    const to = Math.min(end, Math.floor(begin + (b + 1) * size));
    let least = -1, largest = -1;
    for (let i = Math.floor(begin + b * size); i < to; ++i) {
      if (Number.isNaN(ys[i])) continue;
      if (least < 0 || ys[i] < ys[least]) least = i;
      if (largest < 0 || ys[i] > ys[largest]) largest = i;
    }
    if (least < 0) continue;
    kept.push(Math.min(least, largest));
    if (least !== largest) kept.push(Math.max(least, largest));
  }
  return kept;
}

// Rows of dygraphs: one x, and a number or null for each series. The ends of the run are always
// there, since a double-click zooms out to them.
function rowsOf(series, window, width) {
  const rows = new Map();
  series.forEach(({xs, ys}, s) => {
    const [begin, end] = inWindow(xs, window);
    const kept = thinned(ys, begin, end, width);
    const ends = [0, xs.length - 1].filter((i) => xs.length && !Number.isNaN(ys[i]));
    if (ends.includes(0) && kept[0] !== 0) kept.unshift(0);
    if (ends.length && kept[kept.length - 1] !== ends[ends.length - 1])
      kept.push(ends[ends.length - 1]);
    for (const i of kept) {
      const x = xs[i];
      if (!rows.has(x)) rows.set(x, [x, ...series.map(() => null)]);
      rows.get(x)[s + 1] = ys[i];
    }
  });
  return [...rows.values()].sort((a, b) => a[0] - b[0]);
}

// Means of buckets, for series that are stacked: they share their x.
function meanRows(series, window, width) {
  if (!series.length) return [];
  const {xs} = series[0];
  const [begin, end] = inWindow(xs, window);
  const size = Math.max(1, Math.ceil((end - begin) / width));
  const rows = [], row = (from, to) => {
    const out = [xs[from]];
    for (const {ys} of series) {
      let sum = 0, n = 0;
      for (let i = from; i < to; ++i)
        if (!Number.isNaN(ys[i])) {
          sum += ys[i];
          ++n;
        }
      out.push(n ? sum / n : 0);
    }
    rows.push(out);
  };
  if (begin > 0) row(0, 1);
  for (let i = begin; i < end; i += size) row(i, Math.min(end, i + size));
  if (end < xs.length) row(xs.length - 1, xs.length);
  return rows;
}

const visibleRuns = () => runs.filter((r) => r.visible && r.count > 0);

// Whether there is something to see: a number that is not zero.
const hasValues = (ys) => Boolean(ys) && ys.some((y) => y);

// A curve of a run, with a number for each record; `style` has what is not as usual.
const lineOf = (run, label, ys, style = {}) => ({
  label: run.name + label,
  color: run.color,
  dash: null,
  xs: run.x(state.axis),
  ys: style.sharp ? ys : smoothed(ys, state.smooth),
  ...style
});

// One of numbers that few records have: number i of all such curves.
function sparseLineOf(run, label, ys, i) {
  const all = run.x(state.axis), has = [...ys.keys()].filter((k) => !Number.isNaN(ys[k]));
  return lineOf(run, label, ys, {
    // Its own dash on every run, and its own colour where one run is shown.
    color: visibleRuns().length === 1 ? COLORS[(i + 1) % COLORS.length] : run.color,
    dash: DASHES[i % DASHES.length],
    points: has.length <= 200,
    xs: has.map((k) => all[k]),
    ys: has.map((k) => ys[k])
  });
}
const DASHES = [[7, 3], [2, 2], [9, 3, 2, 3], [14, 4], [2, 6], [9, 3, 2, 3, 2, 3]];

// A curve of each run, or several.
const ofRuns = (...columns) => visibleRuns().flatMap(
    (run) => columns.filter(({name}) => hasValues(run.columns[name]))
                 .map(
                     ({name, label = '', ...style}) =>
                         lineOf(run, label && ' ' + label, run.columns[name], style)));

const chosen = () => runs[state.run];
function parts(prefix, names) {
  const run = chosen();
  return names.filter((n) => hasValues(run.columns[prefix + n]))
      .map((n, i) => ({
             label: n,
             color: COLORS[i % COLORS.length],
             xs: run.x(state.axis),
             ys: smoothed(run.columns[prefix + n], state.smooth)
           }));
}
const suffixes = (prefix) => chosen().names(prefix).map((n) => n.slice(prefix.length));

function withValidation() {
  const sets = [...new Set(runs.flatMap((r) => r.names('validation.')))].sort();
  const ofSets = visibleRuns().flatMap(
      (run) => run.names('validation.')
                   .map(
                       (name) => sparseLineOf(
                           run, ` on ${name.slice(11)}`, run.columns[name], sets.indexOf(name))));
  return [...ofRuns({name: 'loss'}), ...ofSets];
}

// GiB that a process was expected to hold: the tensors of its ranks, and on the CPU, where all of
// the process is measured, what it held before there was a model. NaN where that is not known.
function expectedMemory(
    {estimated_memory: bytes, memory_before_gib: before, ranks, processes, device}) {
  const tensors = (bytes ?? NaN) * (ranks / processes) / 2 ** 30;
  return device === 'cpu' ? tensors + (before ?? NaN) : tensors;
}

// Only runs on this device: a process and a GPU hold different things.
function memoryOn(device) {
  const on = visibleRuns().filter((r) => (r.start.device || 'cpu') === device);
  return on.flatMap((run) => {
    const xs = run.x(state.axis), ys = run.columns.memory_gib, held = expectedMemory(run.start);
    if (!hasValues(ys)) return [];
    const measured = lineOf(run, '', ys, {sharp: true});
    if (Number.isNaN(held)) return [measured];
    return [
      measured,
      lineOf(
          run, ' as estimated', ys,
          {dash: [3, 3], xs: [xs[0], xs[xs.length - 1]], ys: [held, held]})
    ];
  });
}

function meanEntropy() {
  return visibleRuns().flatMap((run) => {
    const layers = run.names('expert_entropy.').map((n) => run.columns[n]);
    if (!layers.length) return [];
    const least = layers[0].map((_, i) => Math.min(...layers.map((l) => l[i])));
    const mean = layers[0].map((_, i) => layers.reduce((sum, l) => sum + l[i], 0) / layers.length);
    return [lineOf(run, ' mean of layers', mean), lineOf(run, ' least', least, {dash: [3, 3]})];
  });
}

const FLOAT8 = ['experts', 'dense'].flatMap(
    (of) => ['activations', 'gradients', 'weights'].map((what) => `${of}.${what}`));

// What float8 rounds to 0, of all layers the most: a line for each kind of number. Not every step
// counts.
const float8Zeros = () => visibleRuns().flatMap((run) => FLOAT8.flatMap((what, i) => {
  const layers = run.names(`float8.${what}.zeros.`).map((n) => run.columns[n]);
  if (!layers.length) return [];
  const most = layers[0].map(
      (_, k) => layers.reduce(
          (m, l) =>
              (Number.isNaN(m) ? l[k] :
                   l[k] > m    ? l[k] :
                                 m),
          NaN));
  return [sparseLineOf(run, ' ' + what.replace('.', ' '), most, i)];
}));

const chart = (id, title, unit, series, more = {}) => ({id, title, unit, series, ...more});
// A chart of one column of the runs.
const curve = (name, title, unit, more = {}) =>
    chart(name, title, unit, () => ofRuns({name, sharp: more.sharp}), more);
// The parts of one run on top of each other.
const stack = (id, title, unit, series) =>
    chart(id, title, unit, series, {stacked: true, single: true});

const CHARTS = [
  chart('loss', 'Loss', 'nats per token', withValidation, {log: true}),
  chart(
      'parts', 'Auxiliary losses', 'with their weights',
      () => ofRuns(
          {name: 'balance_loss', label: 'balance'}, {name: 'z_loss', label: 'z', dash: [2, 3]},
          {name: 'mtp_loss', label: 'multi-token prediction', dash: [6, 3]}),
      {log: true}),
  curve('grad_norm', 'Gradient norm', 'before clipping'),
  curve('lr', 'Learning rate', '', {sharp: true}),
  chart(
      'trained', 'Tokens trained on', 'share of those that are read',
      () => ofRuns({name: 'trained_share'}).filter((s) => Math.min(...s.ys) < 0.9), {zero: true}),
  curve('tps', 'Throughput', 'tokens/s of all ranks', {zero: true}),
  curve('tflops', 'Arithmetic', 'TFLOP/s of all ranks', {zero: true}),
  curve('peak_fraction', 'Fraction of the peak', '', {zero: true}),
  chart(
      'memory', 'Memory of the process', 'GiB, the most so far', () => memoryOn('cpu'),
      {zero: true}),
  chart(
      'gpu-memory', 'Memory of the GPU', 'GiB of tensors, the most so far', () => memoryOn('cuda'),
      {zero: true}),
  stack(
      'sections', 'Time by section', 'seconds of a step, on rank 0',
      () => parts('sections.', SECTIONS)),
  stack(
      'sent', 'Bytes by axis', 'sent by rank 0 in a step', () => parts('sent.', suffixes('sent.'))),
  chart('entropy', 'Entropy of the load', 'nats', meanEntropy),
  curve('expert_max_over_mean', 'Busiest expert', 'times the mean, worst layer', {id: 'load'}),
  curve('experts_idle', 'Experts without a token', 'of all layers', {id: 'idle', zero: true}),
  curve(
      'bias_range', 'Range of the expert bias', 'largest less least, worst layer',
      {id: 'bias', zero: true}),
  chart(
      'float8', 'Made 0 by float8', 'share of the numbers, worst layer', float8Zeros, {zero: true}),
];

function short(x) {
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1e12) return (x / 1e12).toPrecision(3) + 'T';
  if (size >= 1e9) return (x / 1e9).toPrecision(3) + 'G';
  if (size >= 1e6) return (x / 1e6).toPrecision(3) + 'M';
  if (size >= 1e4) return (x / 1e3).toPrecision(3) + 'k';
  return size < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(4)));
}
const exactly = (x) =>
    (x === null || x === undefined ? '' :
         Number.isInteger(x)       ? x.toLocaleString('en') :
                                     String(Number(x.toPrecision(6))));

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.box = make('div');
    this.box.className = 'chart';
    this.box.id = 'chart-' + spec.id;
    this.box.innerHTML = `<h3>${spec.title} <small>${
        spec.unit}</small></h3><div class="plot"></div><div class="legend"></div>`;
    byId('charts').append(this.box);
    this.plot = this.box.querySelector('.plot');
    this.legend = this.box.querySelector('.legend');
    this.graph = null;
    this.isStale = true;
  }
  get isOnScreen() {
    const {top, bottom} = this.box.getBoundingClientRect();
    return bottom > -200 && top < window.innerHeight + 200;
  }
  rows() {
    const width = Math.max(100, Math.min(1000, this.plot.clientWidth));
    return (this.spec.stacked ? meanRows : rowsOf)(this.series, state.window, width);
  }
  // Everything anew: other runs, another axis, more data.
  build() {
    this.series = this.spec.series().filter((s) => hasValues(s.ys));
    this.box.hidden = this.series.length === 0;
    if (this.graph) this.graph.destroy();
    this.graph = null;
    if (this.box.hidden) return;
    const styles = {};
    this.labels = this.series.map((s, i) => {
      const label = this.series.findIndex((t) => t.label === s.label) === i ?
          s.label :
          `${s.label} (${i + 1})`;
      styles[label] = {
        strokePattern: s.dash || null,
        drawPoints: Boolean(s.points) || s.xs.length < 3,
        pointSize: 3
      };
      return label;
    });
    this.graph = new Dygraph(this.plot, this.rows(), {
      labels: ['x', ...this.labels],
      colors: this.series.map((s) => s.color),
      series: styles,
      connectSeparatedPoints: true,
      strokeWidth: 1.3,
      legend: 'always',
      labelsDiv: this.legend,
      legendFormatter: (data) => this.describe(data),
      stackedGraph: Boolean(this.spec.stacked),
      includeZero: Boolean(this.spec.zero || this.spec.stacked),
      logscale: Boolean(this.spec.log && state.log),
      dateWindow: state.window,
      axisLabelFontSize: 11,
      highlightCircleSize: 4,
      animatedZooms: false,
      axes: {
        x: {
          axisLabelFormatter: short,
          valueFormatter: exactly,
          pixelsPerLabel: 60,
          drawGrid: false
        },
        y: {axisLabelFormatter: short, axisLabelWidth: 52, valueFormatter: exactly}
      },
      zoomCallback: (low, high) => zoomTo(this.graph.isZoomed('x') ? [low, high] : null, this),
    });
    this.isStale = false;
  }
  zoom() {
    if (!this.graph) return;
    this.graph.updateOptions({file: this.rows(), dateWindow: state.window, valueRange: null});
    this.isStale = false;
  }
  describe(data) {
    const at = data.x === undefined || data.x === null ?
        '' :
        `${state.axis === 'time' ? 'hour' : state.axis.replace('_total', '')} ${exactly(data.x)}: `;
    const all = data.series.filter((s) => at === '' || s.y !== undefined);
    const safe = make('div');
    for (const s of all) {
      const b = make('b', s.label), line = make('span');
      const dash = this.series[this.labels.indexOf(s.label)].dash || [];
      line.innerHTML = '<svg width="26" height="8"><line x2="26" y1="4" y2="4"/></svg>';
      line.querySelector('line').setAttribute('stroke', s.color);
      line.querySelector('line').setAttribute('stroke-dasharray', dash.join(' '));
      b.style.color = s.color;
      safe.append(line, b, at && s.y !== null ? ` ${exactly(s.y)}  ` : '  ');
    }
    return at + safe.innerHTML;
  }
}

const charts = CHARTS.map((spec) => new Chart(spec));

// The curve under the hand is drawn at once, the others on the screen in the next frames, and
// those elsewhere when they come into view.
function zoomTo(window_, first) {
  state.window = window_;
  if (first) first.zoom();
  for (const c of charts)
    if (c !== first) c.isStale = true;
  requestAnimationFrame(drawStale);
}
function drawStale() {
  const next = charts.find((c) => c.isStale && c.graph && c.isOnScreen);
  if (!next) return;
  next.zoom();
  requestAnimationFrame(drawStale);
}
addEventListener('scroll', () => requestAnimationFrame(drawStale), {passive: true});
function rebuild() {
  for (const c of charts) c.build();
  byId('charts-section').hidden = charts.every((c) => c.box.hidden);
}
