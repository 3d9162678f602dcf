#!/usr/bin/env python3
"""The curves of the page are of numbers that a run writes: those of the table in record.cpp, and
what run_data.cpp makes of the others.

curves_test.py ROOT
"""

import pathlib
import re
import sys

MADE_BY_RUN_DATA = {"bias_range"}


def main(root):
    moesh = pathlib.Path(root) / "moesh"
    table = (moesh / "train/metrics/record.cpp").read_text(encoding="utf-8")
    header = (moesh / "train/metrics/record.h").read_text(encoding="utf-8")
    curves = (moesh / "report/page/curves.js").read_text(encoding="utf-8")
    written = set(re.findall(r'^ +\{"(\w+)",', table, re.M))
    written |= set(re.findall(r'"(\w+)"', header.partition("kAuxiliaryNames")[2].partition(";")[0]))
    assert {"loss", "tps", "z_loss", "peak_fraction"} < written, sorted(written)
    drawn = set(re.findall(r"\bcurve\(\s*'(\w+)'|\{name: '(\w+)'", curves))
    drawn = {name for pair in drawn for name in pair if name}
    assert {"loss", "tps", "z_loss"} < drawn, sorted(drawn)
    unknown = drawn - written - MADE_BY_RUN_DATA
    assert not unknown, f"curves.js draws what no run writes: {sorted(unknown)}"
    print(f"{len(drawn)} curves, each of a number that a run writes")


if __name__ == "__main__":
    main(*sys.argv[1:])
