#!/usr/bin/env python3
"""How the command ends: every exit code of the table in moesh/base/exit_code.h, and its message.

exit_codes_test.py CASE MOESH
"""
import fcntl
import json
import os
import pathlib
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time

RUN = ["train", "--data.sequence_length=8", "--data.batch_size=1"]


def run(moesh, *args, code, **options):
    options = {"stdout": subprocess.PIPE, **options}
    done = subprocess.run([moesh, *map(str, args)], stderr=subprocess.PIPE, text=True, timeout=120,
                          **options)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == code, f"moesh {args}: exit code {done.returncode}, not {code}\n{said}"
    return said


def train(moesh, tmp, *args, code, **options):
    return run(moesh, *RUN, f"--metrics.folder={tmp}/metrics", "--checkpoint.enable",
               f"--checkpoint.folder={tmp}/saved", *args, code=code, **options)


def the_table_is_in_the_help_and_on_the_page(tmp, moesh):
    listed = set(re.findall(r"(\d) [a-z]", run(moesh, "help", code=0).split("exit codes:")[1]
                            .split("\n\n")[0].replace("\n", " ")))
    assert listed == set("01234567"), listed
    page = (pathlib.Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert set(re.findall(r"^\| (\d) \|", page, re.M)) == listed, "docs/reliability.md differs"


def does_not_hold_and_usage(tmp, moesh):
    train(moesh, tmp, "--steps=1", code=0)
    saved = tmp / "saved" / "step-00000001"
    run(moesh, "inspect", saved, "--check", code=0)
    (saved / "extra.bin").write_text("x")
    assert "extra.bin" in run(moesh, "inspect", saved, "--check", code=1)
    said = train(moesh, tmp, "\x1b[31mred", code=2)
    assert "\x1b" not in said and "\\x1b[31mred" in said, repr(said)
    assert "stepz" in train(moesh, tmp, "--training.stepz=1", code=2)
    assert "nowhere" in train(moesh, tmp, "--data.path=/nowhere", code=2)


def stopped(tmp, moesh):
    assert "stopped after 1 step:" in train(moesh, tmp, "--steps=9999999", "--max-minutes=1e-9",
                                            code=4)


def diverged(tmp, moesh):
    said = train(moesh, tmp, "--steps=100", "--optimizer.lr=1e30", "--optimizer.eps=1e-30", code=5)
    assert "the run has diverged: 10 steps in a row" in said, said


def no_threads(tmp, moesh):
    """The system gives one thread more than the process has: two ranks cannot be."""
    # The limit counts all processes of a user and does not hold root: root becomes a user without.
    if os.getuid() != 0 or not all(p.stat().st_mode & 1 for p in pathlib.Path(moesh).parents):
        print("skipped: not root, or the program is where others may not go")
        return
    def limit():
        if os.getuid() == 0:  # whom no limit holds
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
    options = {"preexec_fn": limit, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    for command, code in ("train", 2), ("verify", 2):
        said = run(moesh, command, "--mesh=tp=2", "--metrics.folder=", code=code, **options)
        assert "of 2 ranks in this process, only 1 got a thread" in said, said


def too_large(tmp, moesh):
    """Sizes that no machine has are an error with bytes, and without a backtrace."""
    for command in "train", "verify":
        for option in ("data.batch_size=1000000000", "model.vocab_size=1000000000",
                       "model.dim=1000000000"):
            if command == "train":
                said = train(moesh, tmp, "--steps=1", f"--{option}", code=2)
            else:
                said = run(moesh, command, f"--{option}", code=2)
            name, value = option.split("=")
            assert re.search(r"\d+ bytes", said) and "this machine has" in said, said
            assert f"{name} is {value} (" in said, said
            assert "frame #" not in said and "Exception raised" not in said, said


def huge_numbers_end_at_once(tmp, moesh):
    """Rules that list what works do not count up to the number."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    said = run(moesh, "print-config", "--model=mixtral:tiny", "--model.num_heads=999999937",
               "--model.num_kv_heads=2", code=2)
    assert "model.num_kv_heads" in said and "one of [1, 999999937]" in said, said
    run(moesh, "print-config", "--mesh=dp_shard=2147483647,ep=2", code=2)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used < 4, f"{used} s"


def conversions(tmp, moesh):
    """A config.json that its files cannot be of is refused at once, and so is a second conversion
    to the same folder. What a killed one has left is taken over, what others made stays."""
    train(moesh, tmp, "--steps=1", code=0)
    model, out = tmp / "saved" / "step-00000001", tmp / "out"
    left = tmp / "out.saving"
    left.mkdir()
    (left / "thesis.txt").write_text("years")
    assert "is in the way" in run(moesh, "convert", model, out, code=7)
    assert (left / "thesis.txt").read_text() == "years"
    (left / "moesh.json").write_text("")
    with open(left / ".lock", "w") as lock:
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, whole)
        said = run(moesh, "convert", model, out, code=2)
        assert "out.saving' is used by" in said, said
        assert (left / "thesis.txt").read_text() == "years"
    run(moesh, "convert", model, out, code=0)
    assert not left.exists() and not (out / ".lock").exists(), list(tmp.iterdir())
    run(moesh, "inspect", out, "--check", code=0)

    (out / "moesh.json").unlink()
    config = json.loads((out / "config.json").read_text())
    for key in "n_routed_experts", "num_hidden_layers":
        (out / "config.json").write_text(json.dumps({**config, key: 10**9}))
        start = time.monotonic()
        said = run(moesh, "convert", out, tmp / "huge", code=2)
        assert "1000000000" in said, said
        assert time.monotonic() - start < 10, f"{key}: {time.monotonic() - start} s"


def a_configuration_through_a_pipe(tmp, moesh):
    line = f"{moesh} print-config --config <(printf '[training]\\nsteps = 77\\n')"
    said = run("/bin/bash", "-c", line, code=0)
    assert re.search(r"steps = 77 ", said), said


def paths_that_cannot_be(tmp, moesh):
    """A path that no file system takes is an error of usage, with its name."""
    long, below = "n" * 5000, tmp / "file" / "x"
    (tmp / "file").write_text("")
    train(moesh, tmp, "--steps=1", code=0)
    model = tmp / "saved" / "step-00000001"
    for path in long, below:
        for words in (["inspect", path], ["compare", path, path], ["convert", path, tmp / "o"],
                      ["convert", model, path], ["train", "--steps=1", f"--data.path={path}"],
                      ["print-config", f"--data.path={path}"], ["verify", "--golden", path],
                      ["train", f"--checkpoint.initial_load={path}"], ["report", path],
                      ["report", f"{path}.json"], ["verify", "--mesh=tp=2", "--dump", path]):
            done = subprocess.run([moesh, *map(str, words)], capture_output=True, text=True,
                                  timeout=120)
            assert done.returncode in (2, 7), f"{words[:1]}: {done.returncode} {done.stderr[-800:]}"


def storage(tmp, moesh):
    (tmp / "saved").write_text("a file")
    assert "Not a directory" in train(moesh, tmp, "--steps=1", code=7)
    (tmp / "saved").unlink()
    with open("/dev/full", "w") as full:
        assert "standard output" in run(moesh, "help", code=7, stdout=full)
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    assert "File too large" in train(moesh, tmp, "--steps=1", code=7, preexec_fn=small)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](pathlib.Path(folder), sys.argv[2])
    print("as it should be")
