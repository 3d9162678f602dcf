#!/usr/bin/env python3
"""Every header of moesh/ compiles by itself, as it is installed: without the precompiled header of the
build, which hides includes that are missing.

headers_test.py ROOT WORK JOBS PART COMPILER OPTION...     a part of the headers: "2/5" is the second fifth
headers_test.py --self-test WORK COMPILER OPTION...

A header that leads to <ATen/ATen.h> is compiled behind a precompiled header with that and nothing else,
one that leads to <ATen/core/Tensor.h> behind that one: what they would have read anyway.
"""

import concurrent.futures
import pathlib
import re
import subprocess
import sys
import tempfile

INCLUDE = re.compile(r'^ *# *include *(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
PREFIXES = ("ATen/ATen.h", "ATen/core/Tensor.h")  # the larger one first


def reached(root, header, seen):
    """The names of all includes of the header and of the moesh headers that it includes."""
    if header in seen:
        return seen
    seen.add(header)
    path = root / header
    if path.is_file():
        for system, own in INCLUDE.findall(path.read_text(encoding="utf-8")):
            reached(root, own or system, seen)
    return seen


class Compiler:
    def __init__(self, root, work, command):
        self.root, self.work, self.command = root, work, [*command, f"-I{root}"]

    def precompile(self, prefix):
        """A folder with a header that includes the prefix, and its compiled form."""
        header = self.work / (prefix.replace("/", "_") + "pp")
        header.write_text(f"#include <{prefix}>\n", encoding="utf-8")
        self.run("-x", "c++-header", header, "-o", f"{header}.gch")
        return header

    def run(self, *words):
        done = subprocess.run([*self.command, *map(str, words)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        if done.returncode:
            raise RuntimeError(done.stdout)

    def complaint(self, header, prefix):
        source = self.work / (header.replace("/", "_") + ".cpp")
        source.write_text(f'#include "{header}"\n', encoding="utf-8")
        try:
            self.run("-fsyntax-only", *(("-include", prefix) if prefix else ()), source)
            return ""
        except RuntimeError as e:
            return f"{header} does not compile by itself:\n{e}"


def check(root, work, jobs, part, command):
    headers = sorted(p.relative_to(root).as_posix() for p in (root / "moesh").rglob("*.h"))
    number, parts = map(int, part.split("/"))
    headers = headers[number - 1::parts]
    compiler = Compiler(root, work, command)
    ways = {}
    for header in headers:
        names = reached(root, header, set())
        ways[header] = next((p for p in PREFIXES if p in names), None)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = {p: pool.submit(compiler.precompile, p) for p in {*ways.values()} - {None}}
        made = {p: future.result() for p, future in made.items()}
        complaints = list(filter(None, pool.map(
            lambda h: compiler.complaint(h, made.get(ways[h])), headers)))
    if not headers or complaints:
        sys.exit("\n".join(complaints) or f"no headers under {root}/moesh")
    print(f"{len(headers)} headers compile by themselves")


def self_test(work, command):
    """A header that lacks an include is found, with LibTorch and without."""
    good = {"a.h": "#include <string>\nstd::string a();\n",
            "b.h": '#include <ATen/core/Tensor.h>\n#include "moesh/a.h"\nat::Tensor b();\n'}
    bad = {"c.h": "std::string c();\n",
           "d.h": '#include "moesh/b.h"\ninline at::Tensor d() { return at::zeros({1}); }\n'}
    for files, wrong in ((good, []), ({**good, **bad}, ["moesh/c.h", "moesh/d.h"])):
        root = pathlib.Path(tempfile.mkdtemp(dir=work))
        (root / "moesh").mkdir()
        for name, text in files.items():
            (root / "moesh" / name).write_text(text, encoding="utf-8")
        try:
            check(root, root, 2, "1/1", command)
            found = ""
        except SystemExit as e:
            found = str(e)
        assert re.findall(r"^(\S+) does not compile", found, re.MULTILINE) == wrong, found
    print("headers that lack an include are found")


def main(first, *rest):
    if first == "--self-test":
        work, *command = rest
        pathlib.Path(work).mkdir(parents=True, exist_ok=True)
        self_test(work, command)
    else:
        work, jobs, part, *command = rest
        pathlib.Path(work).mkdir(parents=True, exist_ok=True)
        check(pathlib.Path(first).resolve(), pathlib.Path(work), int(jobs), part, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
