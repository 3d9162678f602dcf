#!/usr/bin/env python3
"""Compares moesh with the Python package safetensors, the reference.

safetensors_peer.py PROGRAM copies   each opens what the other wrote, tensor by tensor, every dtype
safetensors_peer.py PROGRAM headers  what the reference takes or refuses, moesh takes or refuses,
                                     but for what is listed
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import safetensors
import safetensors.torch
import torch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
SHAPES = [(), (1,), (3,), (5, 7), (2, 0, 3), (1, 1, 1, 2), (0,)]


def random_tensor(dtype, shape):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


def same(a, b):
    """Bit by bit: NaN equals itself."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(a.reshape(-1).view(torch.uint8)) == bytes(b.reshape(-1).view(torch.uint8))
    )


def compare_copies(program, folder):
    tensors = {
        f"{dtype}.{list(shape)}.ü\n": random_tensor(dtype, shape)
        for dtype in DTYPES
        for shape in SHAPES
    }
    metadata = {"format": "pt", 'a "quoted" key': "grün\u0000\n"}
    safetensors.torch.save_file(tensors, folder / "theirs", metadata=metadata)
    subprocess.run([program, "copy", folder / "theirs", folder / "ours"], check=True)
    with safetensors.safe_open(folder / "ours", framework="pt") as file:
        assert file.metadata() == metadata, file.metadata()
        assert set(file.keys()) == set(tensors), set(file.keys()) ^ set(tensors)
        for name, tensor in tensors.items():
            assert same(file.get_tensor(name), tensor), f"{name!r} is another tensor"
    safetensors.torch.save_file({}, folder / "theirs")
    subprocess.run([program, "copy", folder / "theirs", folder / "ours"], check=True)
    assert safetensors.torch.load_file(folder / "ours") == {}
    print(
        f"safetensors {safetensors.__version__}: {len(tensors)} tensors of {len(DTYPES)} dtypes "
        "come back the same"
    )


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def nested(depth):
    return "[" * depth + "]" * depth


# (header, bytes of data, whether moesh takes it where it is not what the reference does)
def headers():
    def tensors(data, **entries):
        return json.dumps(entries), data

    yield "{}", 0
    yield "{}   ", 0
    yield "{}\n", 0
    yield "{}\0", 0
    yield "{}", 1
    yield "", 0
    yield "[]", 0
    yield "null", 0
    yield " {}", 0, False  # the format requires '{' first
    yield "{},", 0
    yield '{"__metadata__":{}}', 0
    yield '{"__metadata__":null}', 0
    yield '{"__metadata__":{"a":"b"}}', 0
    yield '{"__metadata__":{"a":1}}', 0
    yield '{"__metadata__":{"a":null}}', 0
    yield '{"__metadata__":[]}', 0
    yield '{"__metadata__":{"a":"1","a":"1"}}', 0, False  # a key comes once
    yield '{"__metadata__":{},"__metadata__":{}}', 0
    yield tensors(4, a=entry())
    yield tensors(4, a=entry(), b=entry(shape=[0], offsets=[4, 4]))
    yield tensors(4, b=entry(shape=[0], offsets=[0, 0]), a=entry())
    yield tensors(4, b=entry(shape=[0], offsets=[2, 2]), a=entry())
    yield tensors(8, a=entry(), b=entry(offsets=[4, 8]))
    yield tensors(8, b=entry(offsets=[4, 8]), a=entry())
    yield tensors(8, a=entry(), b=entry(offsets=[2, 6]))
    yield tensors(4, a=entry(), b=entry())
    yield tensors(9, a=entry(), b=entry(offsets=[5, 9]))
    yield tensors(9, a=entry(offsets=[1, 5]), b=entry(offsets=[5, 9]))
    yield tensors(7, a=entry(), b=entry(offsets=[4, 8]))
    yield tensors(9, a=entry(), b=entry(offsets=[4, 8]))
    yield tensors(4, a=entry(offsets=[4, 0]))
    yield tensors(4, a=entry(shape=[5]))
    yield tensors(4, a=entry(shape=[3]))
    yield tensors(1, a=entry(shape=[], offsets=[0, 1]))
    yield tensors(4, a=entry(shape=[2**32, 2**32], offsets=[0, 0]))
    yield tensors(0, a=entry(shape=[2**32, 2**32, 0], offsets=[0, 0]))
    yield tensors(0, a=entry(shape=[0, 2**32, 2**32], offsets=[0, 0]))
    yield tensors(0, a=entry(shape=[2**61], offsets=[0, 0]))
    yield tensors(0, a=entry(shape=[2**64 - 1], offsets=[0, 0]))
    yield tensors(0, a=entry(shape=[2**64], offsets=[0, 0]))
    yield tensors(4, a=entry(shape=[-4]))
    yield tensors(4, a=entry(shape=[4.0]))
    yield tensors(4, a=entry(shape=["4"]))
    yield tensors(4, a=entry(shape=[[4]]))
    yield tensors(4, a=entry(offsets=[0, 4, 4]))
    yield tensors(4, a=entry(offsets=[0]))
    yield tensors(4, a=entry(offsets=[0, 2**64 - 1]))
    yield tensors(4, a=entry(offsets=[0, 2**64]))
    yield tensors(4, a=entry(offsets=[0.0, 4]))
    yield tensors(4, a=entry(more=[1, {"x": None}]))
    yield tensors(4, **{"": entry()})
    yield tensors(4, a=entry(dtype="u8"))
    yield tensors(4, a=entry(dtype="F128"))
    yield tensors(4, a=entry(dtype=None))
    yield tensors(4, a={"dtype": "U8", "shape": [4]})
    yield tensors(4, a=None)
    yield tensors(4, a=7)
    for dtype, size in [("BOOL", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("F16", 2),
                        ("BF16", 2), ("F32", 4), ("F64", 8), ("I8", 1), ("I16", 2), ("U16", 2),
                        ("I32", 4), ("U32", 4), ("I64", 8), ("U64", 8), ("C64", 8)]:  # fmt: skip
        yield tensors(6 * size, a=entry(dtype=dtype, shape=[2, 3], offsets=[0, 6 * size]))
        yield tensors(6 * size + 1, a=entry(dtype=dtype, shape=[2, 3], offsets=[0, 6 * size + 1]))
    for dtype, size in [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)]:
        yield tensors(size, a=entry(dtype=dtype, shape=[2, 4], offsets=[0, size]))
        yield tensors(size // 2, a=entry(dtype=dtype, shape=[3], offsets=[0, size // 2]))
    one = json.dumps(entry())
    yield f'{{"a":{one},"a":{one}}}', 4, False  # a key comes once
    yield '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4
    yield '{"a":["U8",[4],[0,4]]}', 4, False  # an accident of how the reference is written
    yield '{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0
    yield '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":%s}}' % nested(125), 4
    yield '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":%s}}' % nested(126), 4
    yield b'{"\xff":%s}' % one.encode(), 4
    yield b'{"\xc3\xbc":%s}' % one.encode(), 4
    yield '{"\\ud800":%s}' % one, 4
    yield '{"a\tb":%s}' % one, 4
    yield "\ufeff{}", 0


def compare_headers(program, folder):
    files, cases = [], []
    for number, (header, size, *ours) in enumerate(headers()):
        header = header if isinstance(header, bytes) else header.encode()
        bytes_ = len(header).to_bytes(8, "little") + header + b"\1" * size
        try:
            safetensors.deserialize(bytes_)
            theirs = True
        except safetensors.SafetensorError:
            theirs = False
        files.append(folder / str(number))
        files[-1].write_bytes(bytes_)
        cases.append((header, size, theirs, ours[0] if ours else theirs))
        if ours and ours[0] == theirs:
            sys.exit(
                f"{header[:200]} with {size} bytes is listed as a difference, and the reference "
                "does the same"
            )
    lines = subprocess.run(
        [program, "check", *files], check=True, capture_output=True, encoding="utf-8"
    ).stdout.splitlines()
    assert len(lines) == len(cases), f"{len(lines)} answers to {len(cases)} files"
    wrong = [f"{header[:200]} with {size} bytes: the reference "
             f"{'takes' if theirs else 'refuses'} it; moesh: {line}"
             for line, (header, size, theirs, wanted) in zip(lines, cases)
             if (line == "taken") != wanted]  # fmt: skip
    if wrong:
        sys.exit("\n".join(wrong))
    taken = sum(case[2] for case in cases)
    different = sum(case[2] != case[3] for case in cases)
    print(
        f"safetensors {safetensors.__version__}: {taken} headers taken and {len(cases) - taken} "
        f"refused by both, but for {different} listed"
    )


def main():
    program, what = sys.argv[1:]
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        {"copies": compare_copies, "headers": compare_headers}[what](program, pathlib.Path(folder))


if __name__ == "__main__":
    main()
