#!/usr/bin/env python3
"""Compares the losses of several runs, step by step.

    compare_runs.py [--tolerance X] [--svg FILE] NAME=FOLDER NAME=FOLDER ...

The first run is the reference. A folder holds the metrics.jsonl that `moesh train` wrote. The exit
code is 0 only if every run has as many steps as the first, and no loss and no gradient norm is
further away than the tolerance (default 0: the same bits).
With --svg the losses are drawn, and below them each run's distance from the reference.
"""

import argparse
import json
import math
import pathlib
import sys

WIDTH, HEIGHT, MARGIN = 760, 250, 60
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"]


def read(folder):
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def distance(a, b):
    """Of two numbers; a step without a finite one has null there."""
    if a is None or b is None:
        return 0 if a is b else math.inf
    return abs(a - b)


def compare(reference, run):
    """The largest distance of a loss and of a gradient norm."""
    return [
        max((distance(a[key], b[key]) for a, b in zip(reference, run)), default=math.inf)
        for key in ("loss", "grad_norm")
    ]


def curve(values, low, high, top, color):
    def place(i, v):
        x = MARGIN + i * (WIDTH - 2 * MARGIN) / max(1, len(values) - 1)
        return f"{x:.1f},{top + HEIGHT - 30 - (v - low) / (high - low) * (HEIGHT - 50):.1f}"

    points = " ".join(place(i, v) for i, v in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def axis(low, high, top, title, labels, num_steps):
    bottom = top + HEIGHT - 30
    parts = [
        f'<text x="{MARGIN}" y="{top + 12}">{title}</text>',
        f'<path d="M{MARGIN} {top + 20}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#888"/>',
    ]
    for value, y in ((high, top + 24), (low, bottom)):
        parts.append(f'<text x="{MARGIN - 6}" y="{y}" text-anchor="end">{labels(value)}</text>')
    parts.append(
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 16}" text-anchor="end">step {num_steps}</text>'
    )
    return "\n".join(parts)


def draw(names, runs, path):
    losses = [[s["loss"] for s in run] for run in runs]
    low, high = min(map(min, losses)), max(map(max, losses))
    # Distances on a scale of powers of ten; equal bits are drawn at the bottom.
    distances = [
        [math.log10(max(abs(a - b), 1e-17)) for a, b in zip(losses[0], other)]
        for other in losses[1:]
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{2 * HEIGHT + 30 + 18 * len(names)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts.append(axis(low, high, 10, "loss", lambda v: f"{v:.2f}", len(runs[0])))
    parts += [
        curve(values, low, high, 10, COLORS[i % len(COLORS)]) for i, values in enumerate(losses)
    ]
    parts.append(
        axis(
            -17, -5, 10 + HEIGHT, f"distance from {names[0]}", lambda v: f"1e{v:.0f}", len(runs[0])
        )
    )
    parts += [
        curve(values, -17, -5, 10 + HEIGHT, COLORS[(i + 1) % len(COLORS)])
        for i, values in enumerate(distances)
    ]
    for i, name in enumerate(names):
        y = 2 * HEIGHT + 24 + 18 * i
        parts.append(
            f'<rect x="{MARGIN}" y="{y - 9}" width="14" height="10" '
            f'fill="{COLORS[i % len(COLORS)]}"/>'
            f'<text x="{MARGIN + 22}" y="{y}">{name}</text>'
        )
    pathlib.Path(path).write_text("\n".join(parts + ["</svg>"]) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tolerance", type=float, default=0)
    parser.add_argument("--svg")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    args = parser.parse_args()
    names, folders = zip(*(r.split("=", 1) for r in args.runs))
    runs = [read(f) for f in folders]
    failed = 0
    for name, run in zip(names[1:], runs[1:]):
        loss, norm = compare(runs[0], run)
        ok = len(run) == len(runs[0]) and max(loss, norm) <= args.tolerance
        failed += not ok
        print(
            f"{'same' if ok else 'DIFFERS'}: {name}: {len(run)} steps, "
            f"largest distance from {names[0]}: "
            f"loss {loss:.3g}, gradient norm {norm:.3g} (allowed: {args.tolerance:g})"
        )
    if args.svg:
        draw(names, runs, args.svg)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
