#!/usr/bin/env python3
"""The report in a real browser: browser_test.py CASE MOESH CHROMIUM. A case is a function below."""

import http.client
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import made_up  # noqa: E402
from browser import Browser  # noqa: E402

CHART = "moeshReport.charts.find((c) => c.spec.id === '{}')"


def report(moesh, out, *args):
    run = subprocess.run(
        [moesh, "report", *map(str, args), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return out.as_uri()


def drawn(browser, chart, label):
    """The points of a curve, as the library has them: x -> y."""
    rows = browser.run(
        f"(() => {{ const g = {CHART.format(chart)}.graph,"
        f" c = g.getLabels().indexOf({json.dumps(label)});"
        "return Array.from({length: g.numRows()},"
        " (_, r) => [g.getValue(r, 0), g.getValue(r, c)]); })()"
    )
    return {x: y for x, y in rows if y is not None}


def near(a, b):
    return math.isclose(a, b, rel_tol=1e-6)


def middle_of(browser, selector, x=0.5, y=0.5):
    box = browser.run(
        f"(() => {{ const e = document.querySelector('{selector}');"
        "e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()"
    )
    return box[0] + x * box[2], box[1] + y * box[3]


def looks_of(browser, chart):
    """Label, colour and dash of each curve, as they are drawn."""
    return browser.run(
        f"(() => {{ const g = {CHART.format(chart)}.graph, colors = g.getColors();"
        "return g.getLabels().slice(1).map((l, i) =>"
        " [l, colors[i], String(g.getOption('strokePattern', l))]); })()"
    )


def no_complaints(browser, *allowed):
    assert browser.complaints() == [], browser.complaints()
    others = [url for url in browser.requests() if not url.startswith(allowed)]
    assert others == [], f"the page asks for {others}"


def shows_what_was_recorded(tmp, moesh, chromium):
    """Two runs and a result of verify: curves, tables, heat map and meshes have their numbers."""
    a, b = made_up.write(tmp / "a", 300), made_up.write(tmp / "b", 250, lr=0.002, scale=1.2)
    made_up.write_verify(tmp / "verify.json")
    url = report(moesh, tmp / "report.html", a, b, tmp / "verify.json")
    with Browser(chromium) as browser:
        browser.open(url)
        names = browser.run("moeshReport.runs.map((r) => r.name)")
        for name, steps, scale in zip(names, (300, 250), (1, 1.2)):
            loss, norm = drawn(browser, "loss", name), drawn(browser, "grad_norm", name)
            assert sorted(loss) == list(range(1, steps + 1)), sorted(loss)
            for step in loss:
                expected = made_up.record(step, scale)
                assert near(loss[step], expected["loss"]) and near(
                    norm[step], expected["grad_norm"]
                ), (step, loss[step], expected)
            held = drawn(browser, "loss", f"{name} on held <b>out</b>")
            assert sorted(held) == list(range(50, steps + 1, 50)), held
            assert near(
                held[100], made_up.record(100, scale)["validation"]["held <b>out</b>"]["loss"]
            )
        # The whole process is measured: the estimate is its tensors and what was there before.
        estimate = drawn(browser, "memory", f"{names[0]} as estimated")
        assert (
            all(near(y, 8 * 2**24 / 2**30 + 0.125) for y in estimate.values())
            and len(estimate) == 2
        ), estimate
        summary = browser.run("document.getElementById('summary').innerText")
        assert "0.25 GiB of the process, 0.250 GiB as estimated" in summary, summary
        assert near(drawn(browser, "sections", "backward")[7], 0.25) and near(
            drawn(browser, "sent", "dp_shard|cp")[7], 8192
        )
        assert near(drawn(browser, "bias", names[0])[200], 0.4)
        # Only the run that reads much without training on it has this curve.
        assert near(drawn(browser, "trained", names[0])[100], 0.35)
        assert browser.run(f"{CHART.format('trained')}.graph.getLabels()") == ["x", names[0]]
        assert "55.0 % of those in the last step" in summary, summary

        # Hovering says what is there.
        browser.mouse("mouseMoved", *middle_of(browser, "#chart-loss .plot", 0.6))
        text = browser.run("document.querySelector('#chart-loss .legend').innerText")
        found = re.match(rf"step (\d+): {names[0]} ([0-9.]+)", text)
        assert found and abs(float(found[2]) - made_up.record(int(found[1]))["loss"]) < 1e-4, text
        assert (
            browser.run("document.querySelectorAll('.legend b b').length") == 0
        ), "a name of the data became markup"

        # Experts: layer 1, expert 3 has no token.
        browser.mouse("mouseMoved", *middle_of(browser, "#heat", 3.5 / 16, 1.5 / 4))
        text = browser.run("document.getElementById('heat-info').textContent")
        counts = made_up.record(300)["expert_counts"][1]
        assert text.startswith(
            f"MoE layer 1, expert 3: 0 of {sum(counts)} tokens, 0.00 times"
        ), text
        assert browser.run("document.getElementById('frame-step').textContent") == "300"
        browser.run(
            "(() => { const s = document.getElementById('frame'); s.value = 4;"
            "s.dispatchEvent(new Event('input')); })()"
        )
        assert browser.run("document.getElementById('frame-step').textContent") == "5"
        browser.mouse("mouseMoved", *middle_of(browser, "#heat", 0.5 / 16, 0.5 / 4))
        text = browser.run("document.getElementById('heat-info').textContent")
        assert f"expert 0: {made_up.record(5)['expert_counts'][0][0]} of" in text, text

        # Meshes: rank 6 of 2 x 2 x 2, in both views.
        browser.mouse("mouseMoved", *middle_of(browser, '#mesh td[data-rank="6"]'))
        text = browser.run("document.getElementById('mesh-info').textContent")
        assert (
            text == "Rank 6: dp_shard 1, cp 1, tp 0; for routed experts efsdp 1, ep 1, etp 0"
        ), text
        assert browser.run("document.querySelectorAll('#mesh td.here').length") == 2
        browser.mouse("mouseMoved", *middle_of(browser, '#verify td[data-text*="tp=2 ep=2"]'))
        text = browser.run("document.getElementById('verify-info').textContent")
        assert (
            "tp=2 ep=2: holds, worst error 0.0000025 of what is allowed, in d(layers.0.w)" in text
        ), text
        assert "2 of 3 meshes hold" in browser.run("document.getElementById('verify').innerText")

        # Configuration: what differs is marked, origins are named, defaults are left out at first.
        rows = browser.run(
            "[...document.querySelectorAll('#config tr')].map((r) => [r.className, r.innerText])"
        )
        text = {line.split("\t")[0]: (kind, line) for kind, line in rows}
        assert (
            text["optimizer.lr"][0] == "differs" and "run.toml:3" in text["optimizer.lr"][1]
        ), text
        assert (
            "training.seed" not in text
            and '"held # out.txt"' in text["validation.source.0.path"][1]
        ), text
        browser.run("document.getElementById('config-set').click()")
        assert "training.seed" in browser.run("document.getElementById('config').innerText")
        summary = browser.run("document.getElementById('summary').innerText")
        for part in (
            "161,684 parameters",
            "8 ranks: dp_shard=2 cp=2 tp=2 | efsdp=2 ep=2 etp=2",
            "300 of 300",
            "307,200",
            "a-host",
            "torch 2.13",
        ):
            assert part in summary, f"no {part} in {summary}"

        # A run can be hidden, and other axes chosen.
        browser.run("document.querySelector('.chip').click()")
        assert browser.run(f"{CHART.format('grad_norm')}.graph.getLabels()") == ["x", names[1]]
        browser.run(
            "(() => { const x = document.getElementById('x-axis'); x.value = 'tokens_total';"
            "x.dispatchEvent(new Event('change')); })()"
        )
        assert near(drawn(browser, "loss", names[1])[1024 * 10], made_up.record(10, 1.2)["loss"])
        for width in (1600, 420):  # nothing wider than the window
            browser.resize(width, 900, mobile=width < 500)
            browser.wait_for(f"document.documentElement.scrollWidth <= {width}")
        no_complaints(browser, url)


def curves_and_panels_differ(tmp, moesh, chromium):
    """No two curves look alike, a panel shows something, and memory is of like with like."""
    a, b = made_up.write(tmp / "a", 100), made_up.write(tmp / "b", 100, device="cuda", scale=1.2)
    hidden = "[...document.querySelectorAll('.chart')].filter((c) => c.hidden).map((c) => c.id)"
    for runs in ([a], [a, b]):
        with Browser(chromium) as browser:
            browser.open(report(moesh, tmp / "report.html", *runs))
            looks = looks_of(browser, "loss")
            assert len(looks) == 3 * len(runs), looks
            assert len({(color, dash) for _, color, dash in looks}) == len(looks), looks
            if len(runs) == 1:
                assert len({color for _, color, _ in looks}) == 3, looks
            dashed = "#chart-loss .legend line[stroke-dasharray*=' ']"
            shown = browser.run(f'document.querySelectorAll("{dashed}").length')
            assert shown == 2 * len(runs), "the legend shows the dashes"
            assert "chart-idle" in browser.run(hidden), "no expert was idle"
            assert "chart-float8" not in browser.run(hidden)
            on = looks_of(browser, "memory")
            names = browser.run("moeshReport.runs.map((r) => r.name)")
            assert [label for label, _, _ in on] == [names[0], f"{names[0]} as estimated"], on
            if len(runs) == 2:
                on_gpu = drawn(browser, "gpu-memory", f"{names[1]} as estimated")
                assert all(near(y, 8 * 2**24 / 2**30) for y in on_gpu.values()), on_gpu
            else:
                assert "chart-gpu-memory" in browser.run(hidden)
            no_complaints(browser, "file:")


def zooms(tmp, moesh, chromium):
    """Dragging zooms all curves, a double-click gives the whole run back."""
    url = report(moesh, tmp / "report.html", made_up.write(tmp / "a", 300))
    with Browser(chromium) as browser:
        browser.open(url)
        browser.drag(
            middle_of(browser, "#chart-loss canvas", 0.4),
            middle_of(browser, "#chart-loss canvas", 0.7),
        )
        low, high = browser.run("moeshReport.state.window")
        assert 60 < low < high < 260, (low, high)
        browser.wait_for(f"{CHART.format('grad_norm')}.graph.xAxisRange()[0] === {low}")
        browser.double_click(*middle_of(browser, "#chart-loss canvas"))
        assert browser.run("moeshReport.state.window") is None
        browser.wait_for(f"{CHART.format('grad_norm')}.graph.xAxisRange()[1] === 300")
        no_complaints(browser, url)


def a_hundred_thousand_steps(tmp, moesh, chromium):
    """No peak is lost, and a zoom is drawn within 50 ms: the best of ten, on a busy machine."""
    url = report(
        moesh,
        tmp / "report.html",
        made_up.write(tmp / "a", 100_000, layers=1, experts=4, counts=False),
    )
    with Browser(chromium) as browser:
        browser.open(url)
        name = browser.run("moeshReport.runs[0].name")
        loss = drawn(browser, "loss", name)
        assert (
            len(loss) < 5000
            and near(max(loss.values()), made_up.record(77)["loss"])
            and {1, 77, 100_000} <= set(loss)
        ), len(loss)
        browser.run("moeshReport.zoomTo([60, 95], null)")
        browser.wait_for(f"{CHART.format('loss')}.graph.xAxisRange()[0] === 60")
        assert set(range(60, 96)) <= set(
            drawn(browser, "loss", name)
        ), "every step of a small window is drawn"
        no_complaints(browser, url)
        times = browser.run("""(() => { const times = [], c = moeshReport.charts[0];
            for (let i = 0; i < 10; ++i) {
              const from = performance.now();
              moeshReport.zoomTo([1000 * i, 90000 - 1000 * i], c);
              const context = c.plot.querySelector('canvas').getContext('2d');
              context.getImageData(0, 0, 1, 1);  // when all is painted
              times.push(performance.now() - from);
            }
            return times; })()""")
        print("a zoom over 100,000 steps takes", [round(t, 1) for t in times], "ms")
        assert min(times) < 50, times


def follows_a_run(tmp, moesh, chromium):
    """--serve: what a run writes appears, also after a resume; nobody else may ask."""
    folder = made_up.write(tmp / "a", 20)
    server = subprocess.Popen(
        [moesh, "report", str(folder), "--serve", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = re.match(r"(http://127\.0\.0\.1:(\d+)) follows", server.stdout.readline())
        port = int(url[2])
        with Browser(chromium) as browser:
            browser.open(url[1] + "/")
            assert browser.run("moeshReport.runs[0].count") == 20
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as lines:
                for step in range(21, 31):
                    lines.write(json.dumps(made_up.record(step)) + "\n")
                lines.write('{"step": 31, "loss"')  # not written to its end
            browser.wait_for("moeshReport.runs[0].count === 30")
            name = browser.run("moeshReport.runs[0].name")
            assert near(drawn(browser, "loss", name)[30], made_up.record(30)["loss"])
            assert (
                browser.run("document.getElementById('frame-step').textContent") == "30"
            ), "the last frame stays the last"
            again = folder / "metrics.jsonl.new"
            again.write_text(
                "".join(json.dumps(made_up.record(step)) + "\n" for step in range(1, 26)),
                encoding="utf-8",
            )
            again.rename(folder / "metrics.jsonl")
            browser.wait_for("moeshReport.runs[0].count === 25")
            no_complaints(browser, url[1])

        def status(method, path, host):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request(method, path, headers={"Host": host})
            return connection.getresponse().status

        assert status("GET", "/", "localhost") == 200
        assert (
            status("GET", "/", "elsewhere.example") == 403
        ), "another page of the browser could read the run"
        assert status("POST", "/", "127.0.0.1") == 405
        assert status("GET", "/../../etc/passwd", "127.0.0.1") == 404
    finally:
        server.terminate()
        assert server.wait(20) == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](pathlib.Path(folder), *sys.argv[2:])
