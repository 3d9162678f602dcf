#!/usr/bin/env python3
"""Every mistake that can be switched on (MOESH_MUTANT(name) under moesh/) is named by a test and by docs/mutants.md."""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
names = set()
for path in (root / "moesh").rglob("*"):
    if path.suffix in {".h", ".cpp"} and path.name != "mutant.h":
        names |= set(re.findall(r"MOESH_MUTANT\((\w+)\)", path.read_text()))
tests = "\n".join(p.read_text() for p in (root / "tests").rglob("*mutants_test.cpp"))
page = (root / "docs" / "mutants.md").read_text()
missing = [f"{n}: no test kills it" for n in sorted(names) if f'"{n}"' not in tests]
missing += [f"{n}: not in docs/mutants.md" for n in sorted(names) if f"`{n}`" not in page]
print("\n".join(missing) or f"{len(names)} mutants, each with a test and a line in the table")
sys.exit(1 if missing or not names else 0)
