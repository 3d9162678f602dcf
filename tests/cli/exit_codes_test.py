#!/usr/bin/env python3
"""How the command ends: every exit code of the table in moesh/base/exit_code.h, and its message.

exit_codes_test.py CASE MOESH
"""
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

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
    assert "stepz" in train(moesh, tmp, "--training.stepz=1", code=2)
    assert "nowhere" in train(moesh, tmp, "--data.path=/nowhere", code=2)


def stopped(tmp, moesh):
    assert "stopped after 1 steps" in train(moesh, tmp, "--steps=9999999", "--max-minutes=1e-9",
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
    for command, code in ("train", 2), ("verify", 1):
        said = run(moesh, command, "--mesh=tp=2", "--metrics.folder=", code=code, **options)
        assert "of 2 ranks in this process, only 1 got a thread" in said, said


def too_large(tmp, moesh):
    """Sizes that no machine has are an error with bytes, and without a backtrace."""
    said = train(moesh, tmp, "--steps=1", "--data.batch_size=100000000000", code=2)
    assert "tried to allocate" in said and "this machine has" in said and "data.batch_size" in said, said
    assert "frame #" not in said and "Exception raised" not in said, said


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
