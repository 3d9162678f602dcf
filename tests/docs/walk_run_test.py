#!/usr/bin/env python3
"""docs/walk.md lists every source that a run enters: gdb sets a breakpoint on each function of the
program, and takes it away when the run first comes there. Headers need not be listed.

walk_run_test.py ROOT MOESH [SYMBOLS]   SYMBOLS: a file of those that an earlier run has entered
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

from pages_test import files_of_walk

NAME = re.compile(r"([A-Za-z_~]\w*)\(")

# What gdb runs: PROGRAM and OUT are put in.
IN_GDB = """
import gdb, subprocess
for setting in ("pagination off", "confirm off", "breakpoint always-inserted on"):
    gdb.execute("set " + setting)
listed = subprocess.run(["nm", "--defined-only", PROGRAM], capture_output=True, text=True).stdout
places = {int(p[0], 16): p[2] for p in map(str.split, listed.splitlines())
          if len(p) == 3 and p[1] in "tTwW" and "5moesh" in p[2]}
gdb.execute("starti", to_string=True)
base = next(int(line.split()[0], 16) for line in
            gdb.execute("info proc mappings", to_string=True).splitlines() if PROGRAM in line)
entered, done = [], []
class Once(gdb.Breakpoint):
    def __init__(self, place, name):
        super().__init__("*%#x" % (base + place), internal=True)
        self.silent, self.name_of_function = True, name
    def stop(self):
        entered.append(self.name_of_function)
        done.append(self)
        return True
kept = [Once(*place) for place in places.items()]
while gdb.selected_inferior().pid:
    gdb.execute("continue", to_string=True)
    while done:
        done.pop().delete()
open(OUT, "w").write("\\n".join(entered))
"""


def symbols_of_a_run(moesh, arguments):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        out = folder / "symbols"
        script = folder / "breakpoints.py"
        script.write_text(f"PROGRAM, OUT = {str(moesh)!r}, {str(out)!r}\n{IN_GDB}", encoding="utf-8")
        command = ["gdb", "-q", "-batch", "-x", str(script), "--args", str(moesh), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert out.exists(), done.stdout + done.stderr
        return out.read_text(encoding="utf-8").split()


def plain(name):
    """moesh::train::(anonymous namespace)::f<int>(..) as [moesh, train, f]."""
    name = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, ""
    for c in name:
        depth += (c == "<") - (c == ">")
        if depth == 0 and c != ">":
            kept += c
    found = re.search(r"moesh::[\w:~]+", kept)
    return [p for p in found.group(0).split("::") if p] if found else []


def sources_of(root, symbols):
    """The sources in which these functions are defined, as far as their names tell it."""
    definitions = collections.defaultdict(set)
    texts = {}
    for path in sorted((root / "moesh").rglob("*.cpp")):
        name = str(path.relative_to(root))
        texts[name] = path.read_text(encoding="utf-8")
        for line in texts[name].splitlines():
            if line[:1].isalpha() or line.startswith("["):
                for function in NAME.findall(line):
                    definitions[function].add(name)
    command = ["c++filt"]
    names = subprocess.run(command, input="\n".join(symbols), capture_output=True, text=True,
                           check=True).stdout.splitlines()
    found = set()
    for parts in map(plain, names):
        if len(parts) < 3:
            continue
        folder = f"moesh/{parts[1]}/"
        candidates = {f for f in definitions[parts[-1]]
                      if f.startswith(folder) or not (root / folder).is_dir()}
        if parts[-2][0].isupper():
            candidates = {f for f in candidates if f"{parts[-2]}::{parts[-1]}(" in texts[f]}
        if len(candidates) == 1:
            found |= candidates
    return found


def main(root, moesh, symbols=None):
    root = pathlib.Path(root).resolve()
    page = (root / "docs" / "walk.md").read_text(encoding="utf-8")
    words = re.search(r"^    moesh (train .*)$", page, re.M).group(1).split()
    if symbols:
        entered = pathlib.Path(symbols).read_text(encoding="utf-8").split()
    else:
        entered = symbols_of_a_run(pathlib.Path(moesh).resolve(), [*words, "--steps=2"])
    found = sources_of(root, entered)
    assert len(found) > 100, sorted(found)
    missing = sorted(found - set(files_of_walk(page)))
    assert not missing, "docs/walk.md does not list\n  " + "\n  ".join(missing)
    print(f"{len(entered)} functions of {len(found)} sources, and all of these are listed")


if __name__ == "__main__":
    main(*sys.argv[1:])
