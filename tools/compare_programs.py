#!/usr/bin/env python3
"""Whether one of two programs is slower: compare_programs.py [--pairs N] A B [ARGUMENT...]

Each prints one number, such as the time of a step that `bench_trace --alone` prints. They run in
turn, N times each, and which of them is first alternates. Printed is the median of B / A - 1, and
the interval that holds it in 95 cases of 100.
"""

import argparse
import math
import statistics
import subprocess


def interval(values):
    """Order statistics: of n values, as many are below the true median as throws of a coin show
    heads."""
    values = sorted(values)
    below, first = 0, 0
    for k in range(len(values) // 2):
        below += math.comb(len(values), k) / 2 ** len(values)
        if below > 0.025:
            break
        first = k
    return values[first], values[-1 - first]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("programs", nargs=2)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.pairs < 6:
        parser.error(f"--pairs is {args.pairs}; an interval needs 6 or more")
    numbers = [[], []]
    for pair in range(args.pairs):
        for i in (0, 1) if pair % 2 == 0 else (1, 0):
            said = subprocess.run([args.programs[i], *args.arguments], check=True,
                                  stdout=subprocess.PIPE, text=True).stdout
            numbers[i].append(float(said.split()[-1]))
    ratios = [100 * (b / a - 1) for a, b in zip(*numbers)]
    low, high = interval(ratios)
    print(f"A: {statistics.median(numbers[0]):.4g}, B: {statistics.median(numbers[1]):.4g}; "
          f"B is {statistics.median(ratios):+.2f} % of A ({low:+.2f} to {high:+.2f}), "
          f"{args.pairs} pairs")


if __name__ == "__main__":
    main()
