#!/usr/bin/env python3
"""Every row of the table of bad input in docs/data.md: message, exit code, memory.

    bad_input_test.py MOESH            every row, as a test
    bad_input_test.py MOESH --table    the rows, with the memory that was measured
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCAB = 300  # bytes as letters, and some merges that nobody needs
MOST_MIB = 300  # of which 115 are the program and LibTorch


def tokenizer_json():
    """A byte-level tokenizer: the 256 letters that stand for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    for b in range(256):
        letters.setdefault(b, chr(256 + len(letters) - len(printable)))
    vocab = {letters[b]: b for b in range(256)}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []}})


def index(lengths, pointers, documents, code=8):
    """As Megatron writes it."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(documents))
    return (head + struct.pack(f"<{len(lengths)}i", *lengths) +
            struct.pack(f"<{len(pointers)}q", *pointers) +
            struct.pack(f"<{len(documents)}q", *documents))


def write_pair(prefix, ids, idx):
    pathlib.Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    pathlib.Path(f"{prefix}.idx").write_bytes(idx)


def make_inputs(folder):
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "latin.txt").write_bytes(b"caf\xe9 is not UTF-8")
    (folder / "latin.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    (folder / "empty.jsonl").write_text('{"text": ""}\n{"text": "something"}\n')
    (folder / "nothing.jsonl").write_text('{"text": ""}\n')
    with open(folder / "long.jsonl", "wb") as file:  # a hole: it takes no room on the disk
        file.write(b'{"text": "')
        file.seek(1 << 30)
        file.write(b'"}\n{"text": "fine"}\n')
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.bin").mkdir()
    ids = [i % 250 for i in range(400)]
    write_pair(folder / "good", ids, index([400], [0], [0, 1]))
    write_pair(folder / "cut", ids, index([400], [0], [0, 1]))
    os.truncate(folder / "cut.bin", 500)
    write_pair(folder / "lies", ids, index([100, 300], [0, 900], [0, 2]))
    write_pair(folder / "far", ids, index([400], [0], [0, 7]))
    write_pair(folder / "huge", ids, struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1 << 60, 2))
    write_pair(folder / "large", [*ids, 60000], index([401], [0], [0, 1]))
    write_pair(folder / "holes", ids, index([0, 400, 0], [0, 0, 800], [0, 1, 2, 3]))


def tokenize(name, *more):
    out = f"out-{name}" + "".join(more)
    return ["tokenize", "--tokenizer=tokenizer.json", f"--out={out}", name, *more]


def train(name, *more):
    return ["train", "--model=qwen3_moe:tiny", f"--model.vocab_size={VOCAB}", "--steps=2",
            "--data.sequence_length=16", "--metrics.folder=", f"--data.path={name}",
            "--data.shuffle=false", *more]


# What is wrong, the command, its exit code, and what it says.
ROWS = [
    ("broken UTF-8 in a text", tokenize("latin.txt"), 2, "byte 3 of the text is not UTF-8"),
    ("broken UTF-8 in a line", tokenize("latin.jsonl"), 2, "latin.jsonl:2:"),
    ("the same, skipped", tokenize("latin.jsonl", "--on-error=skip"), 0,
     "skipped 1 line"),
    ("an empty document", tokenize("empty.jsonl"), 0, "left out 1 document without text"),
    ("nothing but empty documents", tokenize("nothing.jsonl"), 2, "the inputs hold no text"),
    ("a line of 1 GB", tokenize("long.jsonl"), 2, "long.jsonl:1: this line has 1073741826 bytes"),
    ("the same, skipped", tokenize("long.jsonl", "--on-error=skip"), 0,
     "skipped 1 line"),
    ("a FIFO as text", tokenize("pipe.jsonl"), 2, "a pipe"),
    ("a .bin that was cut off", train("cut.bin"), 2, "the .bin has 500"),
    ("an .idx that lies about positions", train("lies.bin"), 2, "lies.idx"),
    ("an .idx that lies about documents", train("far.bin"), 2, "far.idx"),
    ("an .idx that lies about its size", train("huge.bin"), 2, "huge.idx"),
    ("an id beyond the vocabulary", train("large.bin", "--steps=20"), 2,
     "large.bin: token 400 has the id 60000"),
    ("empty documents among others", train("holes.bin"), 0, "done after 2 steps"),
    ("a FIFO as tokens", train("pipe.jsonl"), 2, "a pipe"),
    ("a folder as tokens", train("folder.bin"), 2, "folder.bin"),
    ("an unknown kind of file", train("tokenizer.json"), 2, "unknown file type"),
]


def run(moesh, folder, command):
    """Exit code, all that was printed, and the largest memory in MiB."""
    with open(folder / "printed", "w+b") as out:
        process = subprocess.Popen([moesh, *command], cwd=folder, stdout=out, stderr=out,
                                   stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return process.returncode, out.read().decode(), usage.ru_maxrss // 1024


def main():
    moesh, shows = os.path.abspath(sys.argv[1]), "--table" in sys.argv
    page = (ROOT / "docs" / "data.md").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_inputs(folder)
        code, said, _ = run(moesh, folder, train("good.bin"))
        assert code == 0, said  # what is right is not refused
        for what, command, wanted, text in ROWS:
            code, said, mib = run(moesh, folder, command)
            assert code == wanted, f"{what}: exit code {code}, not {wanted}\n{said}"
            assert text in said, f"{what}: no '{text}' in\n{said}"
            assert mib < MOST_MIB, f"{what}: {mib} MiB"
            assert shows or f"| {what} |" in page, f"docs/data.md has no row '{what}'"
            line = next(line for line in said.splitlines() if text in line)
            if shows:
                print(f"| {what} | `{line}` | {code} | {mib} MiB |")
    if not shows:
        print(f"{len(ROWS)} rows hold")


if __name__ == "__main__":
    main()
