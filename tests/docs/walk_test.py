#!/usr/bin/env python3
"""The example of docs/example.md, command by command as it is written, with fewer steps.

walk_test.py ROOT MOESH
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Shorter, and nothing else: what is replaced is in the page.
SHORTER = {"steps = 300": "steps = 6", "interval = 100": "interval = 3", "--steps 50": "--steps 8",
           "step-00000300": "step-00000006"}


def commands(page):
    """All blocks of commands of the page."""
    return re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)


def main(root, moesh):
    root = pathlib.Path(root).resolve()
    blocks = commands((root / "docs" / "example.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 6, blocks
    text = "\n".join(blocks)
    for old, new in SHORTER.items():
        assert old in text, f"the example has no '{old}' any more"
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for entry in root.iterdir():
            # Not what is left of the example in this tree.
            if entry.name not in ("build", "walk") and not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
        (folder / "build" / "bin").mkdir(parents=True)
        (folder / "build" / "bin" / "moesh").symlink_to(pathlib.Path(moesh).resolve())
        environment = {**os.environ, "HF_HUB_OFFLINE": "1",
                       "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-e", "-x", "-c", text], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=800)
        both = done.stdout + done.stderr
        assert done.returncode == 0, both
        # What the page says: the mesh was trained, sampled, exported, and transformers agrees.
        for wanted in ("tokenizer.json: 2048 tokens", "done after 6 steps", "holds",
                       "done after 8 steps"):
            assert wanted in both, f"no '{wanted}' in\n{both}"
        assert (folder / "walk" / "export" / "tokenizer.json").exists()
        last = folder / "walk" / "more" / "step-00000008"
        assert (last / "tokenizer.json").exists() and (last / "config.json").exists()
    print(f"{len(blocks)} blocks of commands work as written")


if __name__ == "__main__":
    main(*sys.argv[1:])
