#!/usr/bin/env python3
"""Runs `moesh tokenize` as a user does, and reads what it wrote with a reader of its own, made from
the published format.

    tokenize_test.py PATH_OF_MOESH CASE    CASE: inputs, errors, resume, wide, train, parquet
"""

import gzip
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_indexed(prefix):
    """The documents of PREFIX.bin and PREFIX.idx, from the description of Megatron's format."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\x00\x00" and version == 1
    at = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(index, "<i4", sequences, at)
    at += 4 * sequences
    pointers = np.frombuffer(index, "<i8", sequences, at)
    at += 8 * sequences
    documents = np.frombuffer(index, "<i8", borders, at)
    assert at + 8 * borders == len(index)
    assert documents.tolist() == list(range(sequences + 1))
    data = pathlib.Path(f"{prefix}.bin").read_bytes()
    dtype = np.dtype(DTYPES[code])
    assert sum(lengths) * dtype.itemsize == len(data)
    ids = lambda n, p: np.frombuffer(data, dtype, n, p).astype(int).tolist()
    return dtype, [ids(n, p) for n, p in zip(lengths, pointers)]


def texts(count, seed=1):
    r = random.Random(seed)
    words = ["the", "mixture", "of", "experts", "東京", "и", "für", "\n", '"', "\\", "😀"]
    return [" ".join(r.choices(words, k=r.randrange(1, 40))) for _ in range(count)]


class Case:
    def __init__(self, moesh, folder):
        self.moesh, self.folder = moesh, pathlib.Path(folder)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r" ?\p{L}+|\s+|."), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            special_tokens=["<eod>"],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts(200), trainer)
        self.tokenizer = tokenizer
        self.path = self.folder / "model"
        self.path.mkdir()
        tokenizer.save(str(self.path / "tokenizer.json"))
        (self.path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<eod>"}}')

    def run(self, *arguments, stdin=None, code=0, out="out", tokenizer=None):
        command = [self.moesh, "tokenize", "--tokenizer", tokenizer or self.path]
        command += ["--out", self.folder / out, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, cwd=self.folder)
        self.text = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == code, f"exit code {done.returncode}, not {code}: {self.text}"
        return self.text

    def ids(self, documents, end=()):
        return [e.ids + list(end) for e in self.tokenizer.encode_batch(documents)]

    def expect(self, documents, end=(), out="out", dtype=np.uint16):
        found_dtype, found = read_indexed(self.folder / out)
        assert found_dtype == dtype, found_dtype
        assert found == self.ids(documents, end), "other ids than the package gives"
        for name in self.folder.glob(f"{out}.*"):
            assert name.suffix in (".bin", ".idx", ".json"), f"{name} is left behind"
        check = [self.moesh, "tokenize", "--check", self.folder / out]
        assert subprocess.run(check, capture_output=True).returncode == 0

    def jsonl(self, documents, key="text"):
        return "".join(json.dumps({key: d, "x": 1}) + "\n" for d in documents).encode()


def inputs(case):
    a, b, c, d = (texts(30, seed) for seed in (2, 3, 4, 5))
    folder = case.folder
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(case.jsonl(a))
    (folder / "in" / "b.jsonl.gz").write_bytes(  # two members, as `cat x.gz y.gz` makes
        gzip.compress(case.jsonl(b[:11])) + gzip.compress(case.jsonl(b[11:]))
    )
    (folder / "in" / "sub").mkdir()
    (folder / "in" / "sub" / "c.txt").write_text(c[0] + "\nmore\n\nend", newline="")
    (folder / "in" / ".hidden").write_text("not read")
    packed = subprocess.run(["zstd", "-c"], input=case.jsonl(d), capture_output=True, check=True)
    (folder / "in" / "d.jsonl.zst").write_bytes(packed.stdout)
    case.run("in")
    case.expect(a + b + d + [c[0] + "\nmore\n\nend"])
    case.run("in/*.gz", "in/a.jsonl", "--append-eod", "--threads", "3", out="globs")
    end = case.tokenizer.token_to_id("<eod>")
    case.expect(b + a, end=[end], out="globs")
    # Standard input, another field, blank lines, an empty document, no newline at the end.
    given = case.jsonl(a, "body") + b"\n  \n" + case.jsonl([""], "body") + case.jsonl(b, "body")
    case.run("-", "--format", "jsonl", "--field=body", stdin=given[:-1], out="standard")
    case.expect(a + b, out="standard")
    assert "left out 1 document without" in case.text, case.text
    # The output may be named by either of its files.
    for name in ("standard.bin", "standard.idx", "standard.moesh.json"):
        check = [case.moesh, "tokenize", "--check", folder / name]
        assert subprocess.run(check, capture_output=True).returncode == 0, name
    # Bytes that changed are found.
    with open(folder / "standard.bin", "r+b") as file:
        file.seek(7)
        file.write(b"\xff")
    check = [case.moesh, "tokenize", "--check", folder / "standard"]
    done = subprocess.run(check, capture_output=True)
    assert done.returncode != 0 and b"damaged" in done.stderr, done.stderr


def errors(case):
    good = texts(5)
    folder = case.folder
    lines = case.jsonl(good).splitlines(keepends=True)
    bad = {
        "not JSON": b"{oops\n",
        'no "text"': b'{"body": "x"}\n',
        "must be a string": b'{"text": 3}\n',
        "is a JSON array": b"[1]\n",
        "not JSON (": b'{"text": "\xff"}\n',
        "NUL": b'{"text": "a\0"}\n',
        "at most 67108864": b'{"text": "' + b"x" * (70 << 20) + b'"}\n',
    }
    for i, (reason, line) in enumerate(bad.items()):
        (folder / "bad.jsonl").write_bytes(lines[0] + lines[1] + line + lines[2])
        text = case.run("bad.jsonl", code=2, out=f"bad{i}")
        assert "bad.jsonl:3:" in text and reason in text, text[:500]
        assert not (folder / f"bad{i}.bin").exists() and not (folder / f"bad{i}.idx").exists()
    (folder / "all.jsonl").write_bytes(b"".join([*bad.values(), *lines]))
    case.run("all.jsonl", "--on-error=skip", out="skip")
    case.expect(good, out="skip")
    assert f"skipped {len(bad)} lines" in case.text and "all.jsonl:2:" in case.text, case.text
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    text = case.run("latin.txt", code=2, out="latin")
    assert "latin.txt: byte 3 of the text is not UTF-8" in text, text
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(case.jsonl(texts(500)))[:-20])
    assert "cut off" in case.run("cut.jsonl.gz", code=2, out="cut")
    (folder / "not.jsonl.zst").write_bytes(b"plain text")
    assert "not zstd" in case.run("not.jsonl.zst", code=2, out="not")
    for arguments, reason in (
        (["x.parquet"], "parquet_to_jsonl.py"),
        (["missing.jsonl"], "missing.jsonl"),
        (["none*.jsonl"], "no file matches"),
        (["all.jsonl", "--eod", "<none>"], "<none>"),
        (["all.jsonl", "--surprise"], "--surprise"),
        (["all.jsonl", "--on_eror=skip"], "nearest that it has is --on-error"),
        (["-", "-", "--format=text"], "named twice"),
        (["all.jsonl", "--out=x"], "--out twice"),
        ([], "name the inputs"),
    ):
        assert reason in case.run(*arguments, code=2, out="wrong"), case.text
    # A folder that is not there is a mistake in the command, not of the disk.
    text = case.run("all.jsonl", code=2, out="nodir/x")
    assert "is not a folder" in text and "nodir" in text, text
    assert "is not UTF-8" in case.run("all.jsonl", code=2, out=os.fsdecode(b"caf\xe9"))
    # What stopped at its first lines is in nobody's way: neither corrected nor with other options.
    (folder / "fixed.jsonl").write_bytes(lines[0] + b"{oops\n")
    case.run("fixed.jsonl", code=2, out="corrected")
    assert (folder / "corrected.progress").exists()
    (folder / "fixed.jsonl").write_bytes(lines[0] + lines[1])
    case.run("fixed.jsonl", "--append-eod", out="corrected")
    case.expect(good[:2], end=[case.tokenizer.token_to_id("<eod>")], out="corrected")
    # What is there stays.
    (folder / "there.bin").write_text("mine")
    assert "is there already" in case.run("all.jsonl", "--on-error=skip", code=2, out="there")
    assert (folder / "there.bin").read_text() == "mine"
    os.mkfifo(folder / "pipe.jsonl")
    assert "a pipe" in case.run("pipe.jsonl", code=2, out="pipe")


def documents_written(prefix):
    """As far as the run has promised it."""
    try:
        return json.loads(pathlib.Path(f"{prefix}.progress").read_text())["documents"]
    except FileNotFoundError:
        return 0


def resume(case):
    """Killed again and again, a run ends with the same bytes as one that was left alone."""
    documents = texts(30_000, 6)
    (case.folder / "a.jsonl").write_bytes(case.jsonl(documents[:20_000]))
    (case.folder / "b.jsonl.gz").write_bytes(gzip.compress(case.jsonl(documents[20_000:]), 1))
    names = ["a.jsonl", "b.jsonl.gz"]
    case.run(*names, out="whole")
    case.expect(documents, out="whole")
    command = [case.moesh, "tokenize", "--tokenizer", case.path, "--out", case.folder / "killed"]
    command += ["--threads", "1", "--save-interval", "0", *names]
    reached = []
    for _ in range(4):
        process = subprocess.Popen(
            command, cwd=case.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = reached[-1] if reached else 0
        while process.poll() is None and documents_written(case.folder / "killed") <= before:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        reached.append(documents_written(case.folder / "killed"))
    assert len(reached) >= 2 and reached[0] > 0, f"killed with {reached} documents written"
    if not (case.folder / "killed.idx").exists():
        case.run("--threads", "1", "--save-interval", "0", *names, out="killed")
        assert "continued after document" in case.text, case.text
    case.expect(documents, out="killed")
    for ending in (".bin", ".idx"):
        one, two = ((case.folder / f"{n}{ending}").read_bytes() for n in ("whole", "killed"))
        assert one == two
    print(f"killed with {reached} of {len(documents)} documents written")
    stopped_early(case, names)
    held(case)
    stopped_input(case, documents)


def stop_when_written(case, command, stdin=None):
    process = subprocess.Popen(command, cwd=case.folder, stdin=stdin, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    while process.poll() is None and documents_written(command[5]) == 0:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() != 0, "it was not stopped in time"


def stopped_early(case, names):
    """Other work is refused where documents are written, and so are lengths that have changed."""
    command = [case.moesh, "tokenize", "--tokenizer", case.path, "--out", case.folder / "x"]
    command += ["--threads", "1", "--save-interval", "0"]
    stop_when_written(case, command + names)
    text = case.run(*names[:1], code=2, out="x")
    assert "another tokenizer, other options or other inputs" in text, text
    # Lines that would have stopped a run may be skipped from now on: none was until here.
    stop_when_written(case, [*command[:5], case.folder / "z", *command[6:], *names])
    case.run("--on-error=skip", *names, out="z")
    assert "continued after document" in case.text, case.text
    with open(case.folder / "x.lengths", "r+b") as file:
        file.write(b"\x01")
    text = case.run("--threads", "1", "--save-interval", "0", *names, code=2, out="x")
    assert "x.lengths is damaged" in text and "x.progress" in text, text


def held(case):
    """One that has begun keeps every other out, also in its first moments, and loses nothing."""
    documents = texts(3000, 6)
    (case.folder / "few.jsonl").write_bytes(case.jsonl(documents))
    command = [case.moesh, "tokenize", "--tokenizer", case.path, "--threads", "1", "few.jsonl"]
    for i in range(3):
        out = f"held{i}"
        begun = [subprocess.Popen([*command, "--out", case.folder / out, *more], cwd=case.folder,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                 for more in ([], ["--append-eod"], [])]
        codes = [(p.wait(), p.stderr.read().decode()) for p in begun]
        done = [i for i, (code, _) in enumerate(codes) if code == 0]
        # The third may come when the first has ended, and find its files.
        assert len(done) == 1, codes
        for code, text in codes:
            assert code == 0 or "another moesh tokenize writes to" in text or "File exists" in text \
                or "is there already" in text or "other options" in text, text
        ends = [case.tokenizer.token_to_id("<eod>")] if done == [1] else []
        case.expect(documents, end=ends, out=out)


def stopped_input(case, documents):
    """Whether standard input is the same once more nobody knows."""
    command = [case.moesh, "tokenize", "--tokenizer", case.path, "--out", case.folder / "y"]
    command += ["--save-interval", "0", "--threads", "1", "--format", "jsonl", "-"]
    with open(case.folder / "a.jsonl", "rb") as stdin:
        stop_when_written(case, command, stdin)
    given = case.jsonl(documents[:20_000])
    text = case.run("--format=jsonl", "-", stdin=given, code=2, out="y")
    assert "cannot tell whether standard input is the same again" in text, text
    for name in case.folder.glob("y.*"):
        name.unlink()
    case.run("--format=jsonl", "-", stdin=given, out="y")
    case.expect(documents[:20_000], out="y")


def wide(case):
    """A vocabulary that 16 bits do not hold."""
    parts = json.loads(case.tokenizer.to_str())
    for i in range(len(parts["model"]["vocab"]), 70_000):
        parts["model"]["vocab"][f"Ġunused{i}"] = i
    path = case.folder / "wide.json"
    path.write_text(json.dumps(parts))
    documents = texts(20)
    (case.folder / "a.jsonl").write_bytes(case.jsonl(documents))
    case.run("a.jsonl", tokenizer=path)
    case.expect(documents, dtype=np.int32)


def train(case):
    """What was written is trained on, the same on another mesh; ids beyond the vocabulary are not."""
    documents = texts(300)
    (case.folder / "a.jsonl").write_bytes(case.jsonl(documents))
    case.run("a.jsonl", "--append-eod")
    flat = np.concatenate(case.ids(documents, [case.tokenizer.token_to_id("<eod>")]))
    np.save(case.folder / "flat.npy", flat.astype(np.int64))
    flat.astype(np.uint16).tofile(case.folder / "flat.bin")
    size = case.tokenizer.get_vocab_size()

    def losses(name, *options, vocab_size=size, code=0):
        folder = tempfile.mkdtemp(dir=case.folder)
        command = [case.moesh, "train", "--model=qwen3_moe:tiny", "--steps=3", "--dtype=float64"]
        command += [f"--model.vocab_size={vocab_size}", "--data.sequence_length=16"]
        command += [f"--data.path={case.folder / name}", f"--metrics.folder={folder}", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            return done.stderr
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    one = losses("out.bin", "--data.batch_size=4")
    assert one == losses("out.idx", "--data.batch_size=4")
    split = losses("out.bin", "--data.batch_size=2", "--mesh=dp_shard=2,ep=2")
    assert np.allclose(one, split, rtol=1e-9), (one, split)
    # The same ids without documents: labels across their borders count, so the losses differ.
    npy = losses("flat.npy", "--data.batch_size=4")
    assert npy == losses("flat.bin", "--data.kind=uint16", "--data.batch_size=4") and npy != one
    text = losses("out.bin", vocab_size=size - 5, code=2)
    assert "out.bin: token" in text and f"has {size - 5}" in text, text
    assert "set data.kind to uint16 or uint32" in losses("flat.bin", code=2)


def parquet(case):
    import pyarrow
    import pyarrow.parquet

    documents = texts(50)
    table = pyarrow.table({"n": list(range(51)), "body": [*documents, None]})
    pyarrow.parquet.write_table(table, case.folder / "a.parquet", row_group_size=7)
    tool = [sys.executable, ROOT / "tools/parquet_to_jsonl.py", case.folder / "a.parquet"]
    piped = subprocess.run([*tool, "--field", "body"], capture_output=True, check=True).stdout
    case.run("-", "--format", "jsonl", stdin=piped)
    case.expect(documents)
    wrong = subprocess.run(tool, capture_output=True)
    assert wrong.returncode != 0 and b"no column 'text'; it has n, body" in wrong.stderr


def main():
    with tempfile.TemporaryDirectory() as folder:
        case = Case(os.path.abspath(sys.argv[1]), folder)
        cases = [inputs, errors, resume, wide, train, parquet]
        {f.__name__: f for f in cases}[sys.argv[2]](case)
    print(f"{sys.argv[2]}: as it should be")


if __name__ == "__main__":
    main()
