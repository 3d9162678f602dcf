#!/usr/bin/env python3
"""The schedules, action by action, against those of torch.distributed.pipelining.

    torch_schedules_test.py SCHEDULE_PEER
"""

import logging
import subprocess
import sys

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B",
         "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}


def zero_bubble_of(p, m):
    """Their schedule interleaves, and refuses one stage a rank; its lists do not."""
    s = object.__new__(schedules.ScheduleInterleavedZeroBubble)
    s.n_local_stages, s.pp_group_size, s._n_microbatches = 1, p, m
    s.microbatches_per_round = m
    return [s._calculate_single_rank_operations(rank) for rank in range(p)]


def of_torch(name, p, v, m):
    lists = zero_bubble_of(p, m) if name == "zero_bubble" else get_schedule_ops(
        NAMES[name], p, m, v)
    # Where a rank waits they have nothing; and they reduce gradients by an action.
    return [[word(a) for a in actions if a and (a.sub_actions or a.computation_type.name in LETTERS)]
            for actions in lists]


def word(action):
    if action.sub_actions:
        return "+".join(map(word, action.sub_actions))
    return f"{LETTERS[action.computation_type.name]}{action.stage_index}.{action.microbatch_index}"


def comparable(name, actions):
    """torch numbers the forwards of 1F1B from the rank on: only kinds are compared there."""
    return [a[0] for a in actions] if name == "1f1b" else actions


def cases():
    """Where both have one: 1F1B of torch wants m >= p, and divides what p does not otherwise;
    DualPipeV wants m >= 2p."""
    for p in range(2, 9):
        for m in range(1, 3 * p + 3):
            yield "gpipe", p, 1, m
            yield "zbv", p, 2, m
            yield "zero_bubble", p, 1, m
            if m >= 2 * p:
                yield "dualpipev", p, 2, m
            if m >= p:
                yield "1f1b", p, 1, m
            for v in (2, 3, 4):
                if m % p == 0:
                    yield "interleaved_1f1b", p, v, m


def main(program):
    logging.disable(logging.WARNING)
    wanted = list(cases())
    done = subprocess.run([program], text=True, check=True, stdout=subprocess.PIPE, input="".join(
        " ".join(map(str, c)) + "\n" for c in wanted))
    lines = iter(done.stdout.splitlines())
    for name, p, v, m in wanted:
        mine = [next(lines).split() for _ in range(p)]
        theirs = of_torch(name, p, v, m)
        for rank in range(p):
            if comparable(name, mine[rank]) != comparable(name, theirs[rank]):
                sys.exit(f"{name}, {p} ranks, {v} stages each, {m} micro-batches, rank {rank}:\n"
                         f"moesh: {' '.join(mine[rank])}\ntorch: {' '.join(theirs[rank])}")
    print(f"{len(wanted)} schedules are those of torch")


if __name__ == "__main__":
    main(sys.argv[1])
