#!/usr/bin/env python3
"""tensorboard_test.py MOESH: what the package `tensorboard` reads of a run is what it recorded."""

import json
import math
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def train(moesh, tmp, *options):
    run = subprocess.run(
        [
            moesh,
            "train",
            "--model=deepseek_v3:tiny",
            "--mesh=tp=2,ep=2",
            "--metrics.enable_tensorboard",
            "--metrics.peak_tflops=0.5",
            "--moe.balance_loss_weight=0.01",
            "--checkpoint.enable",
            "--checkpoint.interval=2",
            "--lr_scheduler.kind=constant",
            f"--checkpoint.folder={tmp}/kept",
            f"--metrics.folder={tmp}/run",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def as_float(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def compare(tmp, num_steps):
    records = [json.loads(line) for line in (tmp / "run/metrics.jsonl").read_text().splitlines()]
    read = EventAccumulator(str(tmp / "run/tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    tags = set(read.Tags()["scalars"])
    for tag, of in (
        ("loss_metrics/global_avg_loss", lambda r: r["loss"]),
        ("loss_metrics/balance_loss", lambda r: r["balance_loss"]),
        ("grad_norm", lambda r: r["grad_norm"]),
        ("throughput(tps)", lambda r: r["tps"]),
        ("tflops", lambda r: r["tflops"]),
        ("mfu(%)", lambda r: 100 * r["peak_fraction"]),
        ("memory/max_active(GiB)", lambda r: r["memory_gib"]),
        ("time_metrics/end_to_end(s)", lambda r: r["seconds"]),
        ("n_tokens_seen", lambda r: r["tokens_total"]),
        ("time_metrics/data_loading(s)", lambda r: r["sections"]["data"]),
        ("lr", lambda r: r["lr"]),
        ("experts/entropy/layer_0", lambda r: r["expert_entropy"][0]),
        ("sent/tp(bytes)", lambda r: r["sent"]["tp"]),
    ):
        assert tag in tags, f"no {tag} in {sorted(tags)}"
        events = read.Scalars(tag)
        assert (
            [e.step for e in events]
            == [r["step"] for r in records]
            == list(range(1, num_steps + 1))
        ), (tag, events)
        for event, record in zip(events, records):
            assert math.isclose(
                event.value, as_float(of(record)), rel_tol=2e-3
            ), f"{tag}, step {event.step}: {event.value}, {of(record)}"
            assert abs(event.wall_time - record["time"]) < 0.01, (event, record["time"])


with tempfile.TemporaryDirectory() as folder:
    tmp = pathlib.Path(folder)
    train(moesh := sys.argv[1], tmp, "--steps=4")
    compare(tmp, 4)
    # The same run once more from its second step: TensorBoard drops the third and fourth of the
    # first file.
    shutil.rmtree(tmp / "kept/step-00000004")
    before = list((tmp / "run/tensorboard").iterdir())
    assert len(before) == 1 and before[0].name.startswith("events.out.tfevents."), before
    train(moesh, tmp, "--steps=6")
    compare(tmp, 6)
    assert len(list((tmp / "run/tensorboard").iterdir())) == 2
