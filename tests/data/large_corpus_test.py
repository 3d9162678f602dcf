#!/usr/bin/env python3
"""Memory does not grow with the corpus: large_corpus_test.py MOESH [GB].

Sparse files of so many GB each (3 by default), as .bin with .idx, as .npy and as plain ids, are
trained on and validated on in one run, shuffled, on four ranks. Its peak is compared with that of
the same run on files of a few KB.
"""

import array
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

MOESH, GB = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 3
DOCUMENT = 50_000  # tokens
ROOM = 24  # MiB: allocators, and how the pages of the index are counted


def make(folder, size):
    """Three files of `size` bytes of 16-bit ids, all 0: they take no room on the disk."""
    folder.mkdir()
    tokens = size // 2 // DOCUMENT * DOCUMENT
    with open(folder / "a.bin", "wb") as file:
        file.truncate(2 * tokens)
    count = tokens // DOCUMENT
    with open(folder / "a.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        array.array("i", [DOCUMENT] * count).tofile(file)
        array.array("q", range(0, 2 * tokens, 2 * DOCUMENT)).tofile(file)
        array.array("q", range(count + 1)).tofile(file)
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({tokens},), }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    with open(folder / "b.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        file.truncate(10 + len(text) + 2 * tokens)
    with open(folder / "c.raw", "wb") as file:
        file.truncate(2 * tokens)
    return 3 * 2 * tokens


def peak_of(folder, *more):
    """MiB."""
    named = [f"{s}.{i}.path={folder / f}" for s in ("--data.source", "--validation.source")
             for i, f in enumerate(("a.bin", "b.npy", "c.raw"))]
    named += [f"--{s}.source.2.kind=uint16" for s in ("data", "validation")]
    command = [MOESH, "train", *named, "--steps=6", "--mesh=dp_shard=2,tp=2", "--data.shuffle=true",
               "--data.sequence_length=64", "--data.batch_size=8", "--validation.interval=3",
               "--validation.steps=2", f"--metrics.folder={folder}", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.stdout.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said
    return used.ru_maxrss / 1024


def main():
    with tempfile.TemporaryDirectory() as name:
        tmp = pathlib.Path(name)
        make(tmp / "small", 4 * DOCUMENT)
        size = make(tmp / "large", int(GB * 1e9))
        for packing in ("cut", "best_fit"):
            small, large = (peak_of(tmp / n, f"--data.packing={packing}") for n in ("small", "large"))
            print(f"{packing}: {size / 1e9:.0f} GB of ids on 4 ranks: {large:.0f} MiB at most, "
                  f"{large - small:+.0f} beside {12 * DOCUMENT / 1e6:.1f} MB of them", flush=True)
            assert large < small + ROOM, f"{large:.0f} MiB beside {small:.0f}"


if __name__ == "__main__":
    main()
