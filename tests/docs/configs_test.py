#!/usr/bin/env python3
"""An example configuration is accepted, estimated and, if it is a tiny one, trained.

configs_test.py MOESH FILE
"""

import json
import pathlib
import subprocess
import sys
import tempfile


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout


def values(text):
    """(section, key) -> value, of the TOML that moesh writes and the examples are."""
    found, section = {}, ""
    for line in text.splitlines():
        line = line.split(" #")[0].strip()
        if line.startswith("["):
            section = line
        elif "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found[section, key.strip()] = value.strip()
    return found


def main(moesh, file):
    wanted = values(pathlib.Path(file).read_text(encoding="utf-8"))
    printed = values(run(moesh, "print-config", "--config", file))
    assert wanted, f"{file} sets nothing"
    for key, value in wanted.items():
        assert printed[key] == value, f"{key} is {printed[key]}, not {value}"
    assert "parameters" in run(moesh, "estimate", "--config", file)
    if not file.endswith("_tiny.toml"):
        return
    with tempfile.TemporaryDirectory() as folder:
        run(
            moesh,
            "train",
            "--config",
            file,
            "--steps",
            "2",
            "--lr_scheduler.warmup_steps=1",
            "--metrics.log_freq=1",
            "--metrics.folder",
            folder,
        )
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 2 and all(1 < loss < 10 for loss in losses), f"losses: {losses}"


if __name__ == "__main__":
    main(*sys.argv[1:])
