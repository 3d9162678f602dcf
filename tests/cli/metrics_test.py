#!/usr/bin/env python3
"""Metrics and console of the command: metrics_test.py CASE MOESH. A case is a function below."""

import fcntl
import json
import math
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from runs_test import TINY, fails, served, train  # noqa: E402


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def a_record_adds_up(tmp, moesh):
    """Losses, times, tokens and counts of a record fit together, also after a resume."""
    kept = [
        "--checkpoint.enable",
        "--checkpoint.folder",
        str(tmp / "kept"),
        "--lr_scheduler.kind=constant",
    ]
    options = [
        "--mesh",
        "dp_shard=2,tp=2,ep=4",
        "--moe.balance_loss_weight=0.1",
        "--moe.z_loss_weight=0.01",
        "--metrics.expert_counts_freq=2",
        "--metrics.peak_tflops=0.5",
        *kept,
    ]
    begin = time.time()
    train([moesh], tmp / "run", *options, "--steps=4")
    train([moesh], tmp / "run", *options, "--steps=7")
    lines = records(tmp / "run")
    assert [r["step"] for r in lines] == list(range(1, 8))
    num_tokens = 0
    for r in lines:
        parts = r["loss"] + r["balance_loss"] + r["z_loss"]
        assert (
            abs(parts - r["total_loss"]) < 1e-12
            and min(r["balance_loss"], r["z_loss"]) > 0
        ), r
        in_step = [
            r["sections"][s]
            for s in ("data", "forward", "backward", "reduce", "update", "waiting", "other")
        ]
        assert abs(sum(in_step) - r["seconds"]) < 1e-3 * r["seconds"] and min(in_step) >= 0, r
        assert min(r["sections"][s] for s in ("forward", "backward", "update", "waiting")) > 0, r
        num_tokens += r["tokens"]
        assert r["tokens"] == 2 * 2 * 64 and r["tokens_total"] == num_tokens, r
        assert (
            begin < r["time"] < time.time() and abs(r["peak_fraction"] - r["tflops"] / 0.5) < 1e-4
        ), r
        assert ("expert_counts" in r) == (r["step"] % 2 == 0), r
        if "expert_counts" not in r:
            continue
        layers = r["expert_counts"], r["expert_entropy"], r["expert_bias"]
        for layer, entropy, (low, high) in zip(*layers, strict=True):
            assert sum(layer) == 2 * r["tokens"], "top_k is 2"
            shares = [n / sum(layer) for n in layer if n]
            assert abs(entropy + sum(p * math.log(p) for p in shares)) < 1e-5 and low < 0 < high, r
        assert {"tp", "dp_shard"} <= set(r["sent"]) and all(n > 0 for n in r["sent"].values()), r
    starts = [json.loads(line) for line in (tmp / "run" / "starts.jsonl").read_text().splitlines()]
    assert (
        [s["first_step"] for s in starts] == [0, 4]
        and starts[0]["mesh"]["ep"] == 4
        and starts[0]["estimated_memory"] > 0
    ), starts


def bytes_are_those_of_the_estimate(tmp, moesh):
    """Where no row is routed, rank 0 sends to each group what `moesh estimate` says."""
    sent_and_estimated(tmp / "one_stage", moesh, ["--mesh", "dp_shard=2,cp=2,tp=2"])
    # The rank that holds the most is another one, and sends another number of bytes.
    for schedule in ("zbv", "1f1b"):
        sent_and_estimated(
            tmp / schedule,
            moesh,
            ["--mesh=pp=2,dp_shard=2", "--model.num_layers=4"]
            + [f"--parallelism.pipeline_parallel_schedule={schedule}"]
            + ["--training.gradient_accumulation_steps=9"],
        )


def sent_and_estimated(tmp, moesh, options):
    options = [*options, "--data.batch_size=2"]
    train([moesh], tmp / "run", *options, "--steps=3")
    file = tmp / "estimate.json"
    done = served.run([moesh, "estimate", *TINY, *options, "--json", file], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {}
    for entry in json.loads(file.read_text())["estimates"][0]["traffic"]:
        expected[entry["group"]] = expected.get(entry["group"], 0) + entry["bytes"]
    for r in records(tmp / "run"):
        assert r["sent"] == {group: n for group, n in expected.items() if n > 0}, (
            r["sent"],
            expected,
        )


def a_second_run_truncates_nothing(tmp, moesh):
    """Each run has its folder; the one that was there before moves, whole."""
    for steps in ("2", "3", "4"):
        train([moesh], tmp, "--steps", steps, "--metrics.enable_csv")
    for folder, steps in ((tmp / "earlier" / "0001", 2), (tmp / "earlier" / "0002", 3), (tmp, 4)):
        assert (
            len(records(folder)) == steps
            and len((folder / "metrics.csv").read_text().splitlines()) == steps + 1
        )
        assert f"steps = {steps} " in (folder / "config.toml").read_text()
        start = json.loads((folder / "starts.jsonl").read_text())
        assert start["steps"] == steps and start["config"] == (folder / "config.toml").read_text()


def saving_is_no_step(tmp, moesh_with_faults):
    """Every save takes long; no step does."""
    env = {**os.environ, "MOESH_FAULTS": "sync .saving- 1 100000 sleep100"}
    done = subprocess.run(
        [
            moesh_with_faults,
            "train",
            *TINY,
            "--steps=4",
            "--checkpoint.enable",
            "--checkpoint.interval=1",
            "--checkpoint.async=false",
            f"--checkpoint.folder={tmp}/kept",
            f"--metrics.folder={tmp}/run",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for r in records(tmp / "run")[1:]:
        assert r["sections"]["saving"] > 0.25 and r["seconds"] < r["sections"]["saving"] / 2, r


def quiet_and_log_level(tmp, moesh):
    """--quiet leaves warnings and errors; --log-level chooses among those."""
    assert train([moesh], tmp / "quiet", "--steps", "2", "--quiet") == ""
    assert len(records(tmp / "quiet")) == 2
    # A checkpoint of a Mixtral has no place for an expert bias, which is warned of.
    command = [moesh, "train", "--model=mixtral:tiny", "--moe.load_balance_coeff=0.01", "--steps=1"]
    command += ["--metrics.folder=", "--checkpoint.enable", f"--checkpoint.folder={tmp}/kept"]
    for level, said in (("warn", True), ("off", False)):
        run = served.run([*command, "--log-level", level], timeout=120)
        assert ("[warn" in run.stderr) == said, run.stderr
    fails(
        [moesh, "train", "--log-level", "loud"],
        "--log-level is 'loud'; it takes debug, info, warn, error or off",
    )


def help_of_one_command(tmp, moesh):
    """One screen of commands; COMMAND --help and help COMMAND show that command and its options."""

    def text(*args):
        run = served.run([moesh, *args], timeout=60)
        assert run.returncode == 0, run.stderr
        assert all(len(line) <= 100 for line in run.stdout.splitlines()), run.stdout
        return run.stdout

    screen = text("help")
    assert screen == text("--help") and screen.count("\n") <= 26, screen
    commands = re.findall(r"^  ([a-z-]+)   +\S", screen, re.M)
    assert {"train", "verify", "help", "print-config", "tokenize"} <= set(commands), commands
    for command in commands:
        said = text("help", command)
        assert said == text(command, "--help"), said
        assert said.startswith(f"usage: moesh {command} ") or command == "demo", said
        assert ("--sweep N" in said) == (command == "verify"), said
    for command in ("train", "verify", "estimate", "generate", "print-config"):
        said = text(command, "--help", "--model", "gpt_oss:tiny")
        assert said == text("help", command, "--model=gpt_oss:tiny") and "--training.steps" in said
        assert "--model.window" in said, "the keys of the model that is named"
    for command, option in (("compare", "--rename P=R"), ("report", "--serve PORT")):
        said = text("help", command)
        assert option in said and "--training.steps" not in said, said
    fails([moesh, "trian", "--help"], "there is no command 'trian'")
    fails([moesh, "help", "trian"], "there is no command 'trian'")
    fails([moesh, "help", "--model=gpt_oss:tiny"], "moesh help train --model")


def a_loss_that_is_not_finite_is_said_once(tmp, moesh):
    """The first of several such steps warns, with its number; those before and after are quiet."""
    # Only the head overflows: a NaN that comes to a router ends the run at once.
    head = ["--optimizer.group.0.match=lm_head.weight", "--optimizer.group.0.lr_scale=3e44"]
    run = subprocess.run(
        [moesh, "train", "--model=deepseek_v3:tiny", "--steps=100", "--optimizer.lr=1e-6", *head]
        + ["--metrics.folder", str(tmp), "--training.max_skipped_steps=4"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 5, run.stderr
    # JSON has no NaN: such a loss is null.
    lost = [r["step"] for r in records(tmp) if r["loss"] is None]
    assert len(lost) == 4 and lost[0] > 1, lost
    said = re.findall(r"the loss of step (\d+) is -?(nan|inf)", run.stderr)
    assert [int(step) for step, _ in said] == lost[:1], (said, lost)
    assert "the step changes nothing" in run.stderr, run.stderr


def a_terminal_of_80_columns(tmp, moesh):
    """Colours unless NO_COLOR is set, the time that is left, and nothing wider than that."""
    for variables, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        run = subprocess.Popen(
            [moesh, "train", "--steps", "12", "--metrics.log_freq", "5", "--metrics.folder="],
            stdout=slave,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        os.close(slave)
        text = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # nobody has the other end
                break
            if not piece:
                break
            text += piece
        os.close(master)
        assert run.wait(60) == 0
        text = text.decode()
        assert ("\033[32m" in text) == colored, text
        plain = re.sub("\033\\[[0-9]*[mK]", "", text).replace("\r\n", "\n")
        steps = [
            line
            for line in re.split("[\r\n]", plain)
            if line.startswith("step: ") or " left " in line
        ]
        assert len(steps) >= 12 and all(len(line) <= 80 for line in steps), plain
        assert re.search(r"7 / 12  .* left \d+:\d\d:\d\d", plain), plain


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](pathlib.Path(folder), *sys.argv[2:])
