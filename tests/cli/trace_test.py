#!/usr/bin/env python3
"""Traces of steps, read as Perfetto reads them: trace_test.py CASE MOESH. A case is a function."""

import collections
import json
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import runs_test  # noqa: E402
from runs_test import TINY, fails, same_losses, train  # noqa: E402

MESH = ["--mesh", "dp_shard=2,tp=2,ep=2"]


def slices_by_track(trace):
    tracks = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_nesting(track):
    """Each slice lies in the one around it as a whole; returns them with their depth."""
    # Microseconds with three decimals: whole nanoseconds.
    spans = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), e) for e in track]
    around, placed = [], []
    for begin, end, event in spans:
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or (around[-1][0] <= begin and end <= around[-1][1]), (
            f"{event} overlaps {around[-1][2]}"
        )
        placed.append((event, [e for _, _, e in around]))
        around.append((begin, end, event))
    return placed


def check_trace(folder, out, num_ranks, steps):
    trace = json.loads((folder / f"trace-steps-{steps[0]}-{steps[-1]}.json").read_text())
    assert trace["otherData"]["clock"] == "one for all ranks", trace["otherData"]
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {r: f"rank {r}" for r in range(num_ranks)}, names
    tracks = slices_by_track(trace)
    assert sorted(tracks) == [(r, 0) for r in range(num_ranks)], sorted(tracks)
    in_progress = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "be":
            in_progress[event["id"]].append(event)
    for begin, end in in_progress.values():
        assert (begin["ph"], end["ph"]) == ("b", "e") and begin["ts"] <= end["ts"], (begin, end)
    for (rank, _), track in tracks.items():
        placed = check_nesting(track)
        of_kind = collections.Counter(e["cat"] for e, _ in placed)
        assert of_kind["step"] == len(steps) and of_kind["operator"] > 100, of_kind
        assert [e["name"] for e in track if e["cat"] == "step"] == [f"step {s}" for s in steps]
        sections = {e["name"] for e in track if e["cat"] == "section"}
        assert {"data", "forward", "backward", "reduce", "update"} <= sections, sections
        assert {"attention", "moe", "head"} <= {e["name"] for e in track if e["cat"] == "scope"}
        inside = collections.Counter(a[0]["name"] for e, a in placed if e["name"] == "aten::mm")
        assert set(inside) == {f"step {s}" for s in steps}, inside
        check_collectives(rank, num_ranks, track, [b for b, _ in in_progress.values()])
    lines = out[out.index("what costs most") :].splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 100, lines
    shares = [float(re.search(r"([0-9.]+) %", line)[1]) for line in lines[1:]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.1, lines
    return trace


def check_collectives(rank, num_ranks, track, in_progress):
    mine = [b for b in in_progress if b["pid"] == rank]
    slices = [e for e in track if e["cat"] == "collective"]
    assert {e["name"] for e in slices} == {b["name"] for b in mine}
    for event in [*slices, *mine]:
        args = event["args"]
        assert 0 <= args["slowest_rank"] < num_ranks and args["waited_us"] >= 0, event
        assert event["name"].endswith(" " + args["axes"]) and 2 <= args["ranks"] <= num_ranks
        assert args["slowest_rank"] != rank or args["waited_us"] == 0, event
    buckets = [b for b in mine if b["args"].get("in", "").startswith("start to reduce ")]
    assert len({b["args"]["in"] for b in buckets}) >= 3, buckets
    assert all(re.search(r"\(\d+ gradients?\)$", b["args"]["in"]) for b in buckets), buckets


def sent_bytes(event):
    """What a rank sends of a message, by the least way: moesh/comm/observers.h."""
    n, given = event["args"]["ranks"], event["args"]["bytes"]
    return {"all_reduce": 2 * given * (n - 1) // n, "all_gather": given * (n - 1)}[
        event["name"].split()[0]
    ]


def a_trace_has_every_rank(tmp, moesh):
    """Every rank is there, slices nest, collectives have the bytes that the metrics have."""
    out = train([moesh], tmp, *MESH, "--steps=4", "--profile.steps=2:3")
    trace = check_trace(tmp, out, 4, [2, 3])
    # Where all_reduce and all_gather are all that a group does, rank 0 sends what metrics say.
    records = [json.loads(line) for line in (tmp / "metrics.jsonl").read_text().splitlines()]
    events = [e for e in trace["traceEvents"] if e["ph"] == "b" and e["pid"] == 0]
    compared = 0
    for axes in {e["args"]["axes"] for e in events} - {"world"}:
        of_group = [e for e in events if e["args"]["axes"] == axes]
        if not {e["name"].split()[0] for e in of_group} <= {"all_reduce", "all_gather"}:
            continue
        told = sum(r["sent"][axes] for r in records if r["step"] in (2, 3))
        assert sum(map(sent_bytes, of_group)) == told, (axes, told, of_group)
        compared += 1
    assert compared > 0


def tracing_changes_no_bit(tmp, moesh):
    options = [*MESH, "--steps=3", "--debug.checked"]
    train([moesh], tmp / "a", *options)
    out = train([moesh], tmp / "b", *options, "--profile.steps=2")
    same_losses(tmp / "a", tmp / "b", "traced and not")
    check_trace(tmp / "b", out, 4, [2])


def ranges_of_steps(tmp, moesh):
    """Bad ones are errors that say what to write."""
    for text, *parts in (
        ("3:1", "the last is not before the first"),
        ("0:2", "steps are counted from 1"),
        ("-1", "steps are counted from 1"),
        ("a:b", "as in 10:12"),
        ("1:", "as in 10:12"),
        ("1:2:3", "as in 10:12"),
        ("1-2", "as in 10:12"),
        ("99999999999999999999", "as in 10:12"),
        ("4:6", "training.steps is 5 (command line)", "name steps up to 5"),
    ):
        command = [moesh, "train", *TINY, "--steps=5", f"--profile.steps={text}"]
        fails(command, f'profile.steps is "{text}" (command line)', *parts)
    fails(
        [moesh, "train", *TINY, "--steps=500", "--profile.steps=1:21"],
        "which are 21 steps",
        "name fewer",
    )
    fails(
        [moesh, "train", *TINY, "--steps=5", "--profile.steps=1", "--metrics.folder="],
        "where the trace belongs; name a folder",
    )


def what_a_folder_keeps(tmp, moesh):
    """A second run sets the trace of the first aside; one that goes on after it says so."""
    options = ["--checkpoint.enable", "--checkpoint.folder", str(tmp / "kept")]
    options += ["--lr_scheduler.kind=constant", "--profile.steps=2"]
    run = tmp / "run"
    train([moesh], run, "--steps=2", "--profile.steps=2")
    train([moesh], run, "--steps=3", *options)
    assert (run / "trace-steps-2-2.json").exists()
    assert (run / "earlier" / "0001" / "trace-steps-2-2.json").exists()
    command = [moesh, "train", *TINY, "--metrics.folder", str(run), "--steps=4", *options]
    on = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert on.returncode == 0 and "there will be no trace" in on.stderr, on.stderr
    assert "what costs most" not in on.stdout, on.stdout


def a_pipeline_shows_its_messages(tmp, moesh):
    """Both ends of a message are there, and who was waited for; micro-batches have names."""
    mesh = ["--mesh", "pp=2,tp=2", "--training.gradient_accumulation_steps=4"]
    train([moesh], tmp, *mesh, "--steps=2", "--profile.steps=2")
    trace = json.loads((tmp / "trace-steps-2-2.json").read_text())
    ends = collections.defaultdict(list)
    for (rank, _), track in slices_by_track(trace).items():
        check_nesting(track)
    for e in trace["traceEvents"]:
        if e["ph"] == "b" and e["name"].split()[0] in ("send", "recv"):
            assert e["args"]["ranks"] == 2 and "slowest_rank" in e["args"], e
            ends[e["pid"], e["name"].split()[0]].append(e["args"]["bytes"])
    # Ranks 0 and 1 are the first stage: activations of 4 micro-batches go, and as many gradients
    # come, each as large at both ends.
    for first, last in ((0, 2), (1, 3)):
        assert len(ends[first, "send"]) == len(ends[first, "recv"]) == 4, dict(ends)
        assert ends[first, "send"] == ends[last, "recv"], dict(ends)
        assert ends[first, "recv"] == ends[last, "send"], dict(ends)


def operators(folder, step=2):
    """How often each operator is in the step, by rank, and in how many lanes."""
    trace = json.loads((folder / f"trace-steps-{step}-{step}.json").read_text())
    counts, lanes = collections.defaultdict(collections.Counter), set()
    for (rank, lane), track in slices_by_track(trace).items():
        check_nesting(track)
        lanes.add(lane)
        counts[rank].update(e["name"] for e in track if e["cat"] == "operator")
    return counts, lanes


def two_micro_batches_have_lanes(tmp, moesh):
    """Every operator of both is there, also where a pipeline joins forward and backward."""
    for mesh in ("dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2"):
        options = ["--model=mixtral:tiny", "--mesh", mesh, "--steps=2", "--profile.steps=2"]
        options += ["--training.gradient_accumulation_steps=4", "--data.batch_size=1"]
        options += ["--parallelism.moe_dispatcher=all_to_all"]
        one, two = tmp / f"one {mesh}", tmp / f"two {mesh}"
        train([moesh], one, *options)
        train([moesh], two, *options, "--parallelism.overlap_experts")
        (apart, lane), (beside, lanes) = operators(one), operators(two)
        assert (lane, lanes) == ({0}, {0, 1}), (lane, lanes)
        for rank in apart:
            for name in ("aten::mm", "aten::_log_softmax", "aten::topk", "MmBackward0"):
                assert apart[rank][name] == beside[rank][name], (mesh, rank, name, apart, beside)
            assert apart[rank]["aten::mm"] > 0
        draw = pathlib.Path(__file__).parents[2] / "tools" / "draw_trace.py"
        picture = two / "step.svg"
        subprocess.run([sys.executable, draw, two / "trace-steps-2-2.json", picture], check=True)
        rows = re.findall(r">(0|1): (model|collectives|on the way)<", picture.read_text())
        assert len(set(rows)) == 6, rows


def a_picture_has_every_rank(tmp, moesh):
    """tools/draw_trace.py: as long as they were, what is in the trace, and what it is called."""
    train([moesh], tmp, *MESH, "--steps=3", "--profile.steps=2:3")
    draw = [sys.executable, str(pathlib.Path(__file__).parents[2] / "tools" / "draw_trace.py")]
    trace, out = tmp / "trace-steps-2-3.json", tmp / "step.svg"
    events = json.loads(trace.read_text())["traceEvents"]
    last = [e for e in events if e.get("cat") == "step"][-1]
    gpu = {"pid": last["pid"], "tid": 1}  # a kernel, as a machine with a GPU has them
    of_gpu = [
        {"ph": "M", "name": "thread_name", "args": {"name": "GPU 0 stream 7"}, **gpu},
        {**last, "cat": "kernel", "name": "gemm", **gpu},
    ]
    trace.write_text(json.dumps({"otherData": {"model": "a model"}, "traceEvents": events + of_gpu}))
    subprocess.run([*draw, str(trace), str(out), "--step=3"], check=True)
    picture = xml.etree.ElementTree.parse(out).getroot()
    texts = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {r}" for r in range(4)], texts
    assert any(t.startswith("step 3: ") and "a model" in t for t in texts), texts
    assert texts.count("GPU 0 stream 7") == 1, texts
    bars = [b.attrib for b in picture.iter("{http://www.w3.org/2000/svg}rect") if "x" in b.attrib]
    steps = [e for e in events if e.get("cat") == "step" and e["name"] == "step 3"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    # The backward of each rank is as long beside its step as the bar beside the picture.
    colour = "#1e88e5"
    drawn = sorted(float(b["width"]) for b in bars if b["fill"] == colour)[-4:]
    backward = [e for e in events if e.get("cat") == "section" and e["name"] == "backward"]
    # (That of the head, which is short, is one for itself.)
    backward = sorted(e["dur"] for e in backward if begin <= e["ts"] < end)[-4:]
    assert len(drawn) == len(backward) == 4, (drawn, backward)
    for width, duration in zip(drawn, backward):
        assert abs(width - 980 * duration / (end - begin)) < 0.2, (width, duration, end - begin)
    missing = subprocess.run([*draw, str(trace), str(out), "--step=9"], capture_output=True, text=True)
    assert missing.returncode == 1 and "it has step 2, step 3" in missing.stderr, missing.stderr


def mpi_has_every_rank(tmp, moesh, *mpirun):
    """Processes of one machine have one clock."""
    out = train([*mpirun, "-n", "2", moesh], tmp, *MESH, "--steps=3", "--profile.steps=2:3")
    check_trace(tmp, out, 4, [2, 3])


if __name__ == "__main__":
    vars(runs_test).update({k: v for k, v in globals().items() if callable(v)})
    runs_test.main()
