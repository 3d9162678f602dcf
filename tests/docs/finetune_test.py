#!/usr/bin/env python3
"""The commands of docs/finetune.md, one after the other as they are written.

finetune_test.py ROOT MOESH PYTHON_FOLDER [KEEP]    KEEP: a folder for what was made and printed
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Shorter, and nothing else: what is replaced is in the page.
SHORTER = {"steps = 40": "steps = 6", "interval = 20": "interval = 3", "--steps=20": "--steps=3",
           "--steps=40": "--steps=6", "step-00000040": "step-00000006"}
# What the commands print, in this order.
PRINTED = [
    "tune/q3/tokenizer.json: 2048 tokens",
    "tune/train.mask: ",
    " in 280 conversations of 1 file",
    "trained on: ",
    "tune/held_out.mask: ",
    "tune/train.bin: 280 documents, ",
    "<|im_start|>user\nWhat is ",
    "<|im_start|>assistant\n[[",
    "<|im_end|>\n]]",
    "trained: ",
    "validation on held out: loss ",
    "done after 6 steps",
    "pp=2 cp=2 ep=2: holds",
    "saved tune/lora/step-00000003",
    "going on from tune/lora/step-00000003",
    "saved tune/lora/step-00000006",
    "PEFT has opened 12 adapters",
    "tune/merged: ",
    "What is 2 plus 3?",
    "What is 2 plus 3?",
]


def main(root, moesh, python_folder, keep=None):
    root = pathlib.Path(root).resolve()
    page = (root / "docs" / "finetune.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    text = "\n".join(blocks)
    for old, new in SHORTER.items() if keep is None else ():
        assert old in text, f"the page has no '{old}' any more"
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for entry in root.iterdir():
            # Not what someone has who did the walk here.
            if entry.name not in ("build", "tune") and not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
        (folder / "build" / "bin").mkdir(parents=True)
        (folder / "build" / "bin" / "moesh").symlink_to(pathlib.Path(moesh).resolve())
        (folder / "build" / "python").symlink_to(pathlib.Path(python_folder).resolve())
        environment = {**os.environ, "HF_HUB_OFFLINE": "1",
                       "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=800)
        assert done.returncode == 0, done.stdout
        if keep is not None:
            shutil.copytree(folder / "tune", keep)
            (pathlib.Path(keep) / "printed").write_text(done.stdout, encoding="utf-8")
            return
        at = 0
        for wanted in PRINTED:
            found = done.stdout.find(wanted, at)
            assert found >= 0, f"no '{wanted}' behind byte {at} of\n{done.stdout}"
            at = found + len(wanted)
        report = (folder / "tune" / "report.html").read_text(encoding="utf-8")
        assert "trained_share" in report
    print(f"{len(blocks)} blocks of commands work as written")


if __name__ == "__main__":
    main(*sys.argv[1:])
