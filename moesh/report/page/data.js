// The data of the page: what moesh read of the runs. Columns are arrays of one number a record, as
// bytes in base64 ("f" float32, "d" float64). The scripts of this folder follow each other in one
// function, in the order data, curves, panels, page.

const COLORS =
    ['#1f77b4', '#d62728', '#2ca02c', '#9467bd', '#ff7f0e', '#17becf', '#8c564b', '#e377c2'];
const SECTIONS = ['data', 'forward', 'backward', 'reduce', 'update', 'waiting', 'other'];
const byId = (id) => document.getElementById(id);
function make(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
const payload = JSON.parse(byId('data').textContent);

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
const numbersOf = (c) =>
    ('d' in c ? new Float64Array(bytesOf(c.d)) : new Float32Array(bytesOf(c.f)));

function joined(a, b, length) {  // `a` has `length` numbers, or is not there yet
  const all = new (a || b).constructor(length + b.length).fill(NaN);
  if (a) all.set(a);
  all.set(b, length);
  return all;
}

class Run {
  constructor(given, number) {
    this.color = COLORS[number % COLORS.length];
    this.visible = true;
    this.reset(given);
  }
  reset(given) {
    this.name = given.name;
    this.starts = given.starts;
    this.generation = given.generation;
    this.count = 0;
    this.columns = {};
    this.frames = [];
    this.append(given);
  }
  append(given) {
    this.starts = given.starts;
    for (const [name, encoded] of Object.entries(given.columns))
      this.columns[name] = joined(this.columns[name], numbersOf(encoded), this.count);
    this.count += given.count;
    for (const [name, column] of Object.entries(this.columns))  // ended before the others
      if (column.length < this.count)
        this.columns[name] = joined(
            column, new column.constructor(this.count - column.length).fill(NaN), column.length);
    const {layers, experts, steps, counts} = given.frames;
    const flat = new Uint32Array(bytesOf(counts));
    steps.forEach((step, i) => this.frames.push({
      step,
      layers,
      experts,
      counts: flat.subarray(i * layers * experts, (i + 1) * layers * experts)
    }));
  }
  get start() {
    return this.starts[this.starts.length - 1] || {};
  }
  names(prefix) {
    return Object.keys(this.columns).filter((n) => n.startsWith(prefix));
  }
  x(axis) {
    const column = this.columns[axis] || this.columns.step || new Float64Array(0);
    if (axis !== 'time' || !this.columns.time) return column;
    return column.map((t) => (t - column[0]) / 3600);
  }
}

const runs = payload.runs.map((given, i) => new Run(given, i));
const state = {
  axis: 'step',
  smooth: 0,
  log: false,
  window: null,
  run: 0
};
