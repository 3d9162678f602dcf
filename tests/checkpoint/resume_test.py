#!/usr/bin/env python3
"""Runs of the command that are interrupted and resumed: resume_test.py CASE MOESH [MPIRUN ...].

A case is a function below.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

OPTIONS = [
    "--checkpoint.enable",
    "--checkpoint.interval=4",
    "--checkpoint.keep_latest_k=0",
    "--data.sequence_length=8",
    "--optimizer.lr=1e-2",
]


def arguments(folder, *options):
    return [
        "train",
        *OPTIONS,
        f"--checkpoint.folder={folder / 'saved'}",
        f"--metrics.folder={folder}",
        *options,
    ]


def train(command, folder, *options):
    run = subprocess.run(
        [*command, *arguments(folder, *options)], capture_output=True, text=True, timeout=240
    )
    assert (
        run.returncode == 0
    ), f"{command} {options}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def losses(folder):
    return {
        r["step"]: (r["loss"], r["grad_norm"])
        for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    }


def contents(checkpoint):
    files = {
        p.relative_to(checkpoint): p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()
    }
    return {
        name: data for name, data in files.items() if name.name not in ("moesh.json", "run.toml")
    }  # who wrote it, and where


def mpi_resume_gives_the_same_bits(tmp, moesh, *mpirun):
    """Saved at step 4 and resumed: 20 further losses and all files are those of the run that was
    not stopped, and of threads."""
    command = [*mpirun, "-n", "4", moesh]
    for number, (mesh, *options) in enumerate(
        (
            ["dp_shard=2,tp=2,ep=2"],
            ["dp_replicate=2,cp=2,ep=2", "--checkpoint.async"],
            ["tp=4,ep=2,etp=2", "--dtype=float64"],
        )
    ):
        options = ["--mesh", mesh, "--steps=24", *options]
        whole, again, threads = (tmp / f"{name}{number}" for name in ("whole", "again", "threads"))
        train(command, whole, *options)
        train([moesh], threads, *options)
        shutil.copytree(whole / "saved/step-00000004", again / "saved/step-00000004")
        train(command, again, *options)
        wanted = {step: x for step, x in losses(whole).items() if step > 4}
        assert (
            len(wanted) == 20 and losses(again) == wanted
        ), f"{mesh}: {losses(again)} is not {wanted}"
        for other in (again, threads):
            assert contents(other / "saved/step-00000024") == contents(
                whole / "saved/step-00000024"
            ), f"{mesh}: {other}"


def mpi_async_saves_what_threads_do(tmp, moesh, *mpirun):
    """Two processes with two ranks each save in the background after every step: the bytes are those
    of threads that save in between. Under a sanitizer, what it reports ends a run with a code of its
    own."""
    options = ["--mesh", "dp_shard=2,tp=2,ep=2", "--steps=6", "--checkpoint.interval=1"]
    train([*mpirun, "-n", "2", moesh], tmp / "mpi", *options, "--checkpoint.async")
    train([moesh], tmp / "threads", *options)
    names = sorted(p.name for p in (tmp / "mpi" / "saved").glob("step-*"))
    assert len(names) == 6, names
    for name in names:
        ours, theirs = (tmp / of / "saved" / name for of in ("mpi", "threads"))
        assert contents(ours) == contents(theirs), name


def sigterm_saves_the_step_and_ends(tmp, moesh, *mpirun):
    command = [*mpirun, "-n", "2", moesh] if mpirun else [moesh]
    run = subprocess.Popen(
        [
            *command,
            *arguments(
                tmp, "--steps=1000000", "--max-minutes=5", "--checkpoint.interval=1000000",
                "--mesh", "tp=2,ep=2"
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.time() + 60
        while not ((tmp / "metrics.jsonl").exists() and len(losses(tmp)) >= 3):
            assert (
                time.time() < deadline and run.poll() is None
            ), "the run did not get to its third step"
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 4, f"exit code {run.returncode}\n{out}{err}"
    last = max(losses(tmp))
    names = {p.name for p in (tmp / "saved").iterdir()}
    assert names == {".lock", f"step-{last:08}"}, names
    said = train([moesh], tmp, f"--steps={last}", "--mesh", "tp=2,ep=2")
    assert f"nothing to do: the checkpoint is of step {last}" in said, said


def main():
    case, moesh, rest = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as tmp:
        globals()[case](pathlib.Path(tmp), moesh, *rest)


if __name__ == "__main__":
    main()
