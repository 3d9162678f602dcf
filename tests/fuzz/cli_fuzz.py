#!/usr/bin/env python3
"""Random command lines: the command must end with a documented exit code and without a backtrace.

cli_fuzz.py MOESH_SERVED COUNT [SEED] [JOBS]

Words come from the help text: commands, options and keys of models, with values that are right,
nearly right, huge, negative, of another type, or files that are missing, damaged, pipes or devices.
Exit code 3 (moesh itself failed) is a failure here: nothing that somebody types is moesh's fault.

No line may take longer than a minute of computing. What multiplies the work of a run (AMOUNTS) is
therefore small, or nothing that can be granted: a million micro-batches would be a wish that takes
its time, and no fault.
"""
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served  # noqa: E402

ALLOWED = {0, 1, 2, 4, 5, 6, 7}
NEVER = ["frame #", "Exception raised from", "terminate called", "Sanitizer", "basic_string",
         "vector::", "std::bad_alloc", "internal error", "C++ CapturedTraceback"]
MEMORY = 12 << 30  # bytes of addresses: a size that is too large fails, and takes no machine down
CPU_SECONDS = 60  # which do not depend on what else this machine does
WALL_SECONDS = 900  # of one that waits for ever

# What multiplies the work of a run, and has no limit but the patience of whoever asks for it.
AMOUNTS = {"--steps", "--training.steps", "--training.max_minutes", "--max-minutes", "--sweep",
           "--training.gradient_accumulation_steps", "--training.global_batch_size",
           "--data.batch_size", "--data.sequence_length", "--validation.steps",
           "--max-new-tokens"}
SMALL = ["1", "2", "3"]
REFUSED = ["0", "-1", "9223372036854775808", "-9223372036854775808", "1e400", "nan", "inf", "-inf",
           "0x10", "+5", " 4", "4 ", "4k", "1.5GiB", "", "auto", "5-1", "1/2", "[1, 2]", "a=b"]
# Commands that compute with them. The others, such as estimate, take any number.
COMPUTING = ("train", "verify", "generate")

FLAGS = ["--help", "--checkpoint.enable", "--checkpoint.async"]
GENERAL = ["--steps", "--dtype", "--config", "--mesh", "--model", "--device", "--max-minutes"]
MODELS = ["deepseek_v3:tiny", "mixtral:tiny", "qwen3_moe:tiny", "llama4:tiny", "gpt_oss:tiny",
          "mixtral", "nobody:tiny", "mixtral:", ":tiny", "qwen3_moe:debug"]
MESHES = ["tp=2", "dp_shard=2,ep=2", "tp=0", "tp=-1", "tp=2,tp=4", "ep=3", "tp=99999999999", "x=2",
          "tp", "", "cp=2,tp=2", "dp_shard=2,tp=2,ep=4", "tp=1000000"]
NUMBERS = ["0", "1", "2", "3", "7", "8", "64", "-1", "1000000", "999999999999",
           "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1e9", "1e-9",
           "1e400", "nan", "inf", "-inf", "0.5", "0x10", "1_000", "+5", " 4", "4 ", "4k", "1.5GiB"]
TEXTS = ["", "true", "false", "auto", "float32", "float64", "bfloat16", "cuda", "cpu", "adamw",
         "sgd", "wsd", "\x1b[31mred", "a" * 5000, "=", "==", "'", '"', "\\", "%s%n", "../..", "\n",
         "5-8", "1/2", "0/0", "[1, 2]", "{}", "(a*)*b", "(", "[", "a=b", "^(.*)$=$1$1$1", "ä"]
# Every byte is a token, and there are two merges.
LETTERS = [chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256),
                            *range(256, 256 + 68)]]
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [], "post_processor": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
              "vocab": {t: i for i, t in enumerate([*LETTERS, "he", "ll"])},
              "merges": [["h", "e"], ["l", "l"]]}}


def own_options(moesh):
    """The commands of the help text, each with its own options, and whether they take a value."""

    def text(*args):
        return subprocess.run([moesh, "help", *args], capture_output=True, text=True,
                              timeout=WALL_SECONDS).stdout

    commands = {}
    for name in re.findall(r"^  ([a-z-]+)   +\S", text(), re.M):
        own = text(name).split("Options go into")[0]
        found = re.findall(r"^  (--[a-z-]+)( [A-Z0-9]| [a-z_0-9]+\|)?", own, re.M)
        commands[name] = [(option, bool(value)) for option, value in found]
    assert {"train", "verify", "tokenize"} <= commands.keys(), commands
    assert ("--threads", True) in commands["tokenize"], commands
    assert ("--all", False) in commands["compare"], commands
    return commands


class Words:
    def __init__(self, moesh, folder):
        self.folder = pathlib.Path(folder)
        texts = [subprocess.run([moesh, "help", "train", f"--model={model}"], capture_output=True,
                                text=True, timeout=WALL_SECONDS).stdout for model in MODELS[:5]]
        self.keys = sorted(set(re.findall(r"^\s+--([a-z_]+\.[a-z_0-9]+)=", "".join(texts), re.M)))
        assert len(self.keys) > 60, self.keys
        self.own = own_options(moesh)
        self.paths = self.make_paths(moesh)

    def make_paths(self, moesh):
        saved = self.folder / "saved"
        subprocess.run([moesh, "train", "--steps=1", "--data.sequence_length=8",
                        "--metrics.folder=", "--checkpoint.enable",
                        f"--checkpoint.folder={saved}"], check=True, timeout=WALL_SECONDS,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        whole = saved / "step-00000001"
        weights = next(whole.glob("*.safetensors"))
        (self.folder / "cut.safetensors").write_bytes(weights.read_bytes()[:3000])
        (self.folder / "text.txt").write_text("hello " * 100)
        (self.folder / "bad.jsonl").write_text('{"text": 1}\n')
        (self.folder / "good.jsonl").write_text('{"text": "hello"}\n' * 20)
        (self.folder / "good.toml").write_text('[training]\nsteps = 1\n')
        (self.folder / "bad.toml").write_text('[training\nsteps = = 1\n')
        (self.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (self.folder / "empty").mkdir()
        os.mkfifo(self.folder / "pipe")
        self.names = [path.name for path in self.folder.iterdir() if path != saved]
        return ["/nowhere/x", "/dev/null", "/dev/zero", "/proc/self/mem", "/dev", "-",
                *sorted(self.names), str(saved), str(whole), str(weights),
                str(whole / "config.json"), str(whole / "moesh.json"), "x/" * 2000, "n" * 300]

    def value(self, pick):
        kind = pick.random()
        if kind < 0.45:
            return pick.choice(NUMBERS)
        if kind < 0.7:
            return pick.choice(TEXTS)
        if kind < 0.9:
            return pick.choice(self.paths)
        return pick.choice(MODELS + MESHES)

    def option(self, pick, command):
        kind = pick.random()
        own = self.own.get(command)
        if kind < 0.3 and own:
            name, takes_value = pick.choice(own)
            if not takes_value:
                return [name]
        elif kind < 0.6:
            name = "--" + pick.choice(self.keys)
        elif kind < 0.8:
            name = pick.choice(GENERAL)
        elif kind < 0.88:  # of any command
            name = pick.choice([name for options in self.own.values() for name, _ in options])
        elif kind < 0.96:
            return [pick.choice(FLAGS)]
        else:
            name = "--" + "".join(pick.choice("abc.=-_ 1") for _ in range(pick.randrange(12)))
        if name == "--serve":  # at a port that can be, for ever
            value = pick.choice(["-1", "65536", "1e400", "http", ""])
        elif name in AMOUNTS and command in COMPUTING:
            value = pick.choice(SMALL if pick.random() < 0.5 else REFUSED)
        elif name == "--mesh" and pick.random() < 0.7:
            value = pick.choice(MESHES)
        elif name == "--model" and pick.random() < 0.7:
            value = pick.choice(MODELS)
        else:
            value = self.value(pick)
        if pick.random() < 0.1:
            return [name]
        return [f"{name}={value}"] if pick.random() < 0.6 else [name, value]

    def line(self, pick):
        commands = [*self.own, "--version"]
        command = pick.choice(commands) if pick.random() < 0.97 else self.value(pick)
        words = [command]
        if command in ("compare", "convert", "inspect", "tokenize", "generate", "report"):
            words += [pick.choice(self.paths) for _ in range(pick.choice([0, 1, 1, 2, 2, 2, 3]))]
        if command == "tokenize" and pick.random() < 0.7:
            words += ["--tokenizer=tokenizer.json", "--out=out"]
        if command == "generate" and pick.random() < 0.7:
            words += [pick.choice(["--prompt=a", "--prompt-ids=1,2"]), "--tokenizer=bytes"]
        # Without options it is the longest of all, and tests/cli has it.
        least = 1 if command == "demo" else 0
        for _ in range(max(least, pick.choice([0, 1, 1, 1, 2, 2, 3, 5]))):
            words += self.option(pick, command)
        # What is not under trial is small: a word that comes first is overridden.
        if command == "train":
            words[1:1] = ["--steps=1", "--data.sequence_length=8", "--data.batch_size=1",
                          "--metrics.folder="]
        if command == "verify":
            words[1:1] = ["--data.sequence_length=8"]
        return [w.replace("\0", "") for w in words]


def trial(servers, words, seed):
    """What is wrong with one random command line; its exit code."""
    line = words.line(random.Random(seed))
    server = servers.get()
    with tempfile.TemporaryDirectory(dir=words.folder) as own, \
            tempfile.TemporaryDirectory(dir=words.folder) as said_in:
        for name in words.names:
            os.symlink(words.folder / name, pathlib.Path(own) / name)
        out, err = (pathlib.Path(said_in) / name for name in ("out", "err"))
        code = server.run(line, own, out, err, MEMORY, CPU_SECONDS, WALL_SECONDS)
        stdout, stderr = out.read_bytes(), err.read_bytes()
    servers.put(server)
    if code is None:
        return f"trial {seed}: no end within {WALL_SECONDS} s: {line}", "waits"
    said = (stdout + stderr).decode(errors="replace")
    wrong = [text for text in NEVER if text in said]
    if code == -signal.SIGXCPU:
        wrong.append(f"more than {CPU_SECONDS} s of computing")
    elif code not in ALLOWED:
        wrong.append(f"exit code {code}")
    if code not in (0, 1) and not stderr:
        wrong.append("no message")
    # What a model says is printed as it is where no terminal reads it.
    if b"\x1b" in (b"" if line[0] == "generate" else stdout) + stderr:
        wrong.append("an escape for the terminal")
    return (f"trial {seed}: {wrong}: {line}\n{said[-1500:]}" if wrong else None), code


def main():
    moesh, count = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1 << 30)
    jobs = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    print(f"seed {seed}", flush=True)
    codes, failures = collections.Counter(), []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
        words = Words(moesh, folder)
        servers = queue.Queue()
        for _ in range(jobs):
            servers.put(served.Server(moesh, {"OMP_NUM_THREADS": "1"}))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for failure, code in pool.map(lambda i: trial(servers, words, seed + i), range(count)):
                codes[code] += 1
                if failure:
                    failures.append(failure)
                    print(failure, flush=True)
    print(f"{count} command lines, exit codes: "
          + ", ".join(f"{code}: {n}" for code, n in sorted(codes.items(), key=str))
          + f"; {len(failures)} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
