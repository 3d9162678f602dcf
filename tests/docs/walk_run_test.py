#!/usr/bin/env python3
"""docs/walk.md lists every source that a run enters, and says how many a step enters: gdb sets a
breakpoint on each function of the program, and takes it away when the run first comes there; from
the record of the second step to that of the third they are set anew. Headers need not be listed.

walk_run_test.py ROOT MOESH
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from pages_test import files_of_walk

NAME = re.compile(r"([A-Za-z_~]\w*)\(")
CLASS = re.compile(r"^(?:class|struct) (\w+)", re.M)

# What gdb runs: PROGRAM and OUT are put in.
IN_GDB = """
import gdb, json, subprocess
for setting in ("pagination off", "confirm off", "breakpoint always-inserted on"):
    gdb.execute("set " + setting)
listed = subprocess.run(["nm", "--defined-only", PROGRAM], capture_output=True, text=True).stdout
places = {int(p[0], 16): p[2] for p in map(str.split, listed.splitlines())
          if len(p) == 3 and p[1] in "tTwW" and "5moesh" in p[2]}
gdb.execute("starti", to_string=True)
base = next(int(line.split()[0], 16) for line in
            gdb.execute("info proc mappings", to_string=True).splitlines() if PROGRAM in line)
entered, in_step, done, records = [], [], [], []
class Once(gdb.Breakpoint):
    def __init__(self, place, name):
        super().__init__("*%#x" % (base + place), internal=True)
        self.silent, self.name_of_function = True, name
    def stop(self):
        (in_step if len(records) == 2 else entered).append(self.name_of_function)
        done.append(self)
        return True
class EndOfStep(gdb.Breakpoint):
    def stop(self):
        records.append(1)
        return True
end = next(place for place, name in places.items() if "JsonlSink5write" in name)
kept = [Once(*place) for place in places.items()]
EndOfStep("*%#x" % (base + end), internal=True).silent = True
while gdb.selected_inferior().pid:
    before = len(records)
    gdb.execute("continue", to_string=True)
    while done:
        done.pop().delete()
    if before != len(records) == 2:
        again = [Once(*place) for place in places.items() if place[0] != end]
open(OUT, "w").write(json.dumps([entered + in_step, in_step]))
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
        return json.loads(out.read_text(encoding="utf-8"))


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
    definitions, classes = collections.defaultdict(set), collections.defaultdict(set)
    texts = {}
    for path in sorted((root / "moesh").rglob("*.cpp")):
        name = str(path.relative_to(root))
        texts[name] = path.read_text(encoding="utf-8")
        for line in texts[name].splitlines():
            if line[:1].isalpha() or line.startswith("["):
                for function in NAME.findall(line):
                    definitions[function].add(name)
        for defined in CLASS.findall(texts[name]):
            classes[defined].add(name)
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
            candidates = candidates or {f for f in classes[parts[-2]] if f.startswith(folder)}
        # moesh::kernels::cpu::f is in moesh/kernels/cpu, moesh::kernels::f is not below that.
        inner = folder + "/".join(p for p in parts[2:-1] if (root / folder / p).is_dir())
        candidates = {f for f in candidates if f.rpartition("/")[0] == inner.rstrip("/")} or candidates
        if len(candidates) == 1:
            found |= candidates
    return found


def main(root, moesh):
    root = pathlib.Path(root).resolve()
    page = (root / "docs" / "walk.md").read_text(encoding="utf-8")
    words = re.search(r"^    moesh (train .*)$", page, re.M).group(1).split()
    entered, in_step = symbols_of_a_run(pathlib.Path(moesh).resolve(), [*words, "--steps=4"])
    found, of_step = sources_of(root, entered), sources_of(root, in_step)
    assert len(found) > 80, sorted(found)
    missing = sorted(found - set(files_of_walk(page)))
    assert not missing, "docs/walk.md does not list\n  " + "\n  ".join(missing)
    said = re.search(r"a step itself enters (\d+) of them", page)
    assert said and 50 < len(of_step) <= int(said.group(1)), (
        f"a step enters {len(of_step)} sources; docs/walk.md says {said and said.group(1)}:\n  " +
        "\n  ".join(sorted(of_step)))
    print(f"{len(entered)} functions of {len(found)} sources, all of which are listed; "
          f"a step enters {len(of_step)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
