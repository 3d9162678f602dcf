#!/usr/bin/env python3
"""Random command lines: the command must end with a documented exit code and without a backtrace.

cli_fuzz.py MOESH COUNT [SEED] [JOBS]

Words come from the help text: commands, options and keys of models, with values that are right,
nearly right, huge, negative, of another type, or files that are missing, damaged, pipes or devices.
Exit code 3 (moesh itself failed) is a failure here: nothing that somebody types is moesh's fault.
"""
import collections
import concurrent.futures
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cli"))
import bad_input_test  # noqa: E402  (its tokenizer)

ALLOWED = {0, 1, 2, 4, 5, 6, 7}
NEVER = ["frame #", "Exception raised from", "terminate called", "Sanitizer", "basic_string",
         "vector::", "std::bad_alloc", "internal error", "C++ CapturedTraceback"]
MEMORY = 12 << 30  # bytes of addresses: a size that is too large fails, and takes no machine down
SECONDS = 120

COMMANDS = ["train", "verify", "compare", "estimate", "convert", "inspect", "tokenize", "generate",
            "print-config", "help", "--version"]
FLAGS = ["--check", "--all", "--help", "--checkpoint.enable", "--checkpoint.async"]
OWN = ["--steps", "--sweep", "--sample", "--sample-seed", "--shard", "--json", "--dump", "--golden",
       "--tolerance", "--rename", "--search", "--memory", "--layout", "--dtype", "--config",
       "--mesh", "--model", "--device", "--max-minutes", "--prompt", "--prompt-ids",
       "--max-new-tokens", "--temperature", "--top-p", "--seed", "--tokenizer", "--out", "--field",
       "--eod", "--format", "--on-error", "--threads", "--save-interval"]
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


class Words:
    def __init__(self, moesh, folder):
        self.folder = pathlib.Path(folder)
        text = ""
        for model in MODELS[:5]:
            text += subprocess.run([moesh, "help", f"--model={model}"], capture_output=True,
                                   text=True, timeout=SECONDS).stdout
        self.keys = sorted(set(re.findall(r"^\s+--([a-z_]+\.[a-z_0-9]+)=", text, re.M)))
        assert len(self.keys) > 60, self.keys
        self.paths = self.make_paths(moesh)

    def make_paths(self, moesh):
        saved = self.folder / "saved"
        subprocess.run([moesh, "train", "--steps=1", "--data.sequence_length=8",
                        "--metrics.folder=", "--checkpoint.enable",
                        f"--checkpoint.folder={saved}"], check=True, timeout=SECONDS,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        whole = saved / "step-00000001"
        weights = next(whole.glob("*.safetensors"))
        (self.folder / "cut.safetensors").write_bytes(weights.read_bytes()[:3000])
        (self.folder / "text.txt").write_text("hello " * 100)
        (self.folder / "bad.jsonl").write_text('{"text": 1}\n')
        (self.folder / "good.toml").write_text('[training]\nsteps = 1\n')
        (self.folder / "bad.toml").write_text('[training\nsteps = = 1\n')
        (self.folder / "tokenizer.json").write_text(bad_input_test.tokenizer_json())
        (self.folder / "empty").mkdir()
        os.mkfifo(self.folder / "pipe")
        return ["/nowhere/x", "/dev/null", "/dev/zero", "/proc/self/mem", "/", "pipe", "empty",
                "text.txt", "bad.jsonl", "good.toml", "bad.toml", "cut.safetensors", str(saved),
                str(whole), str(weights), str(whole / "config.json"), str(whole / "moesh.json"),
                "x/" * 2000, "n" * 300]

    def value(self, pick):
        kind = pick.random()
        if kind < 0.45:
            return pick.choice(NUMBERS)
        if kind < 0.7:
            return pick.choice(TEXTS)
        if kind < 0.9:
            return pick.choice(self.paths)
        return pick.choice(MODELS + MESHES)

    def option(self, pick):
        kind = pick.random()
        if kind < 0.5:
            name = "--" + pick.choice(self.keys)
        elif kind < 0.85:
            name = pick.choice(OWN)
        elif kind < 0.95:
            return [pick.choice(FLAGS)]
        else:
            name = "--" + "".join(pick.choice("abc.=-_ 1") for _ in range(pick.randrange(12)))
        if name == "--mesh" and pick.random() < 0.7:
            value = pick.choice(MESHES)
        elif name == "--model" and pick.random() < 0.7:
            value = pick.choice(MODELS)
        else:
            value = self.value(pick)
        if pick.random() < 0.1:
            return [name]
        return [f"{name}={value}"] if pick.random() < 0.6 else [name, value]

    def line(self, pick):
        command = pick.choice(COMMANDS) if pick.random() < 0.97 else self.value(pick)
        words = [command]
        if command in ("compare", "convert", "inspect", "tokenize", "generate"):
            words += [pick.choice(self.paths) for _ in range(pick.choice([0, 1, 1, 2, 2, 2, 3]))]
        for _ in range(pick.choice([0, 1, 1, 1, 2, 2, 3, 5])):
            words += self.option(pick)
        # What is not under trial is small and ends: a word that comes first is overridden.
        if command == "train":
            words[1:1] = ["--steps=1", "--max-minutes=0.02", "--data.sequence_length=8",
                          "--data.batch_size=1", "--metrics.folder="]
        if command == "tokenize" and pick.random() < 0.7:
            words += ["--tokenizer=tokenizer.json", "--out=out"]
        if command == "generate" and pick.random() < 0.7:
            words += [pick.choice(["--prompt=a", "--prompt-ids=1,2"]), "--tokenizer=bytes"]
        if command == "verify" and pick.random() < 0.9:
            words[1:1] = ["--data.sequence_length=8"]
        return [w.replace("\0", "") for w in words]


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))


def trial(moesh, words, seed):
    """What is wrong with one random command line; its exit code."""
    line = words.line(random.Random(seed))
    with tempfile.TemporaryDirectory(dir=words.folder) as own:
        for name in ("pipe", "empty", "text.txt", "bad.jsonl", "good.toml", "bad.toml",
                     "cut.safetensors", "tokenizer.json"):
            os.symlink(words.folder / name, pathlib.Path(own) / name)
        try:
            done = subprocess.run([moesh, *line], cwd=own, capture_output=True, timeout=SECONDS,
                                  stdin=subprocess.DEVNULL, preexec_fn=limited,
                                  env={**os.environ, "OMP_NUM_THREADS": "1",
                                       "OMP_WAIT_POLICY": "passive"})  # it starts once, not twice
        except subprocess.TimeoutExpired:
            # A million micro-batches are a wish that takes its time; nothing else may.
            if re.search(r"\d{4}|e9", " ".join(line)):
                return None, "long"
            return f"trial {seed}: no end within {SECONDS} s: {line}", None
    said = (done.stdout + done.stderr).decode(errors="replace")
    wrong = [text for text in NEVER if text in said]
    if done.returncode not in ALLOWED:
        wrong.append(f"exit code {done.returncode}")
    if done.returncode not in (0, 1) and not done.stderr:
        wrong.append("no message")
    # What a model says is printed as it is where no terminal reads it.
    if b"\x1b" in (b"" if line[0] == "generate" else done.stdout) + done.stderr:
        wrong.append("an escape for the terminal")
    return (f"trial {seed}: {wrong}: {line}\n{said[-1500:]}" if wrong else None), done.returncode


def main():
    moesh, count = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1 << 30)
    jobs = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    print(f"seed {seed}", flush=True)
    codes, failures = collections.Counter(), []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
        words = Words(moesh, folder)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for failure, code in pool.map(lambda i: trial(moesh, words, seed + i), range(count)):
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
