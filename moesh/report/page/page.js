// Controls, and following a run.

function showRuns() {
  byId('runs').replaceChildren(...runs.map((run) => {
    const dot = make('i'), chip = make('button', dot, make('span', run.name));
    chip.className = 'chip' + (run.visible ? '' : ' off');
    chip.title = 'show or hide';
    dot.style.background = run.color;
    chip.onclick = () => {
      run.visible = !run.visible;
      showRuns();
      rebuild();
    };
    return chip;
  }));
}
for (const choice of document.querySelectorAll('.run-choice')) {
  choice.append(...runs.map((r, i) => new Option(r.name, i)));
  choice.parentElement.hidden = runs.length === 1;
  choice.onchange = () => {
    state.run = Number(choice.value);
    for (const other of document.querySelectorAll('.run-choice')) other.value = state.run;
    byId('frame').value = Math.max(0, chosen().frames.length - 1);
    showHeat();
    showMesh();
    for (const c of charts)
      if (c.spec.single) c.build();
  };
}
byId('x-axis').onchange = (e) => {
  state.axis = e.target.value;
  state.window = null;
  rebuild();
};
byId('smooth').oninput = (e) => {
  state.smooth = Number(e.target.value);
  rebuild();
};
byId('log-y').onchange = (e) => {
  state.log = e.target.checked;
  rebuild();
};
byId('reset').onclick = () => zoomTo(null, null);
byId('frame').oninput = showHeat;
byId('heat').onmousemove = heatCell;
byId('mesh').onmouseover = pointAtRank;
byId('verify').onmouseover = (e) => {
  if (e.target.dataset.text) byId('verify-info').textContent = e.target.dataset.text;
};
byId('config-set').onchange = showConfig;
[...byId('heat-scale').querySelectorAll('i')].forEach((i, n) => {
  const stops =
      [0, 0.25, 0.5, 0.75, 1].map((t) => `rgb(${heatColor(n === 0 ? Math.max(0.01, t) : 4 ** t)})`);
  i.style.background = `linear-gradient(90deg, ${stops})`;
});

function showAll() {
  showSummary();
  const slider = byId('frame'), wasLast = slider.value === slider.max;
  slider.max = Math.max(0, chosen().frames.length - 1);
  if (wasLast) slider.value = slider.max;
  showHeat();
  rebuild();
}

async function follow() {
  try {
    const known = runs.map(
                          (r) => `${r.generation}.${r.count}.${
                              r.frames.length ? r.frames[r.frames.length - 1].step : 0}`)
                      .join(',');
    const answer = await fetch(`data?known=${known}`, {cache: 'no-store'});
    const {runs: more} = await answer.json();
    let isNew = false;
    more.forEach((given, i) => {
      if (given.generation !== runs[i].generation) {
        runs[i].reset(given);
        isNew = true;
      } else if (given.count > 0) {
        runs[i].append(given);
        isNew = true;
      }
      while (runs[i].frames.length > 2000)
        runs[i].frames = runs[i].frames.filter((_, n) => n % 2 === 1);
    });
    if (isNew) {
      showAll();
      showMesh();
      showConfig();
    }
    byId('live').textContent = `live, step ${exactly(last(runs[0].columns.step))}`;
  } catch {
    byId('live').textContent = 'not connected';
  }
  setTimeout(follow, payload.live);
}

showRuns();
byId('frame').max = Math.max(0, chosen().frames.length - 1);
byId('frame').value = byId('frame').max;
showAll();
showMesh();
showVerify();
showConfig();
addEventListener('resize', () => {
  for (const c of charts) c.isStale = true;
  requestAnimationFrame(drawStale);
});
window.moeshReport = {
  runs,
  charts,
  state,
  zoomTo
};  // for tests and the console
if (payload.live) setTimeout(follow, payload.live);
