#!/usr/bin/env python3
"""README shows the code of the example, what it prints, and what the compiler says about a mistake.

readme_test.py ROOT code                            its first C++ block is the example's region
                                                    between [readme] and [/readme]
readme_test.py ROOT output PROGRAM                  what the example prints is what README shows
readme_test.py ROOT message compile_commands.json   without the all_gather the example does not
                                                    compile, and g++ says what README shows
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

EXAMPLE = "examples/tensor_parallel_mlp.cpp"
GATHERED, FORGOTTEN = "all_gather<tp>(x_BLD, sequence)", "x_BLD"


def text_of(root, name):
    return (root / name).read_text(encoding="utf-8")


def example_region(root):
    text = text_of(root, EXAMPLE)
    found = re.findall(r"^// \[readme\]\n(.*?)^// \[/readme\]$", text, re.M | re.S)
    assert len(found) == 1, f"{EXAMPLE} has {len(found)} regions from [readme] to [/readme]"
    return found[0]


def fenced(root, language):
    """The first block of README between ```language and ```."""
    text = text_of(root, "README.md")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)[0]


def code(root):
    shown, real = fenced(root, "cpp"), example_region(root)
    assert shown == real, f"README shows\n{shown}\nand {EXAMPLE} has\n{real}"


def output(root, program):
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    shown = fenced(root, "console")
    command, expected = shown.split("\n", 1)
    assert command == "$ build/bin/tensor_parallel_mlp", f"README runs {command}"
    assert said == expected, f"README shows\n{expected}\nand the example prints\n{said}"


def message(root, commands):
    entry = next(
        e
        for e in json.loads(pathlib.Path(commands).read_text(encoding="utf-8"))
        if e["file"].endswith(EXAMPLE)
    )
    source = text_of(root, EXAMPLE)
    assert source.count(GATHERED) == 1, f"{EXAMPLE} has no line with {GATHERED}"
    words = shlex.split(entry["command"])
    words = words[: words.index("-o")]
    with tempfile.TemporaryDirectory() as folder:
        for what, compiles in ((source, True), (source.replace(GATHERED, FORGOTTEN), False)):
            path = pathlib.Path(folder) / "mlp.cpp"
            path.write_text(what, encoding="utf-8")
            run = subprocess.run(
                [*words, "-fsyntax-only", str(path)],
                cwd=entry["directory"],
                env={**os.environ, "LC_ALL": "C"},
                capture_output=True,
                text=True,
            )
            assert (run.returncode == 0) == compiles, f"exit code {run.returncode}:\n{run.stderr}"
    said = run.stderr.replace("moesh::", "")
    for line in map(str.strip, fenced(root, "text").splitlines()):
        assert line in said, f"README shows\n{line}\nand the compiler says\n{said}"


if __name__ == "__main__":
    globals()[sys.argv[2]](pathlib.Path(sys.argv[1]), *sys.argv[3:])
