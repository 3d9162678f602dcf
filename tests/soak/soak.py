#!/usr/bin/env python3
"""Runs that are killed, stopped, damaged, doubled and put on bad disks, in random order.

soak.py MOESH MOESH_WITH_FAULTS MINUTES [SEED]

One run after the other trains to the same last step, with a fault at most starts. After each start
the newest whole checkpoint must be at least as new as before, but for what this script itself has
damaged; every exit code must be one that the fault allows, and 0 only where the last step is there;
and every run that ends must have the bytes of one that nobody disturbed. Prints how often each
fault was tried, and what came of it.
"""
import collections
import filecmp
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

STEPS = 60
TIMEOUT = 300  # seconds in which a run must end: nothing may hang
OPTIONS = [f"--steps={STEPS}", "--mesh=tp=2,ep=2", "--data.sequence_length=8",
           "--data.batch_size=1", "--checkpoint.enable", "--checkpoint.interval=4",
           "--checkpoint.keep_latest_k=3",
           "--metrics.log_freq=100000"]
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
       "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm": "isolated",
       "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
       "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


class Soak:
    def __init__(self, moesh, faulty, folder, seed):
        self.moesh, self.faulty, self.folder = moesh, faulty, pathlib.Path(folder)
        self.random = random.Random(seed)
        self.counts = collections.Counter()
        self.newest = self.num_starts = self.num_finished = 0
        self.failures, self.logs = [], []
        self.reference = self.folder / "reference"
        self.saved = self.folder / "saved"
        codes = [self.wait(self.start(self.reference))]
        assert codes == [0] and not self.failures, f"the reference run failed: {codes}"
        self.num_starts = 0

    def start(self, saved=None, program=None, faults="", before=(), **options):
        # A run that resumes may save in the background or not: the bytes are the same.
        more = ["--checkpoint.async"] if self.random.random() < 0.5 else []
        command = [*before, program or self.moesh, "train", *OPTIONS, *more,
                   f"--checkpoint.folder={saved or self.saved}",
                   f"--metrics.folder={self.folder}/m", "--debug.timeout_seconds=20"]
        self.num_starts += 1
        self.logs.append(tempfile.TemporaryFile("w+", dir=self.folder))
        env = {**os.environ, **(MPI if before else {}), "MOESH_FAULTS": faults}
        return subprocess.Popen(command, stdout=self.logs[-1], stderr=subprocess.STDOUT, env=env,
                                **options)

    def wait(self, run):
        try:
            return run.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            self.failures.append(f"a run did not end within {TIMEOUT} s: {run.args}")
            return None

    def steps(self):
        if not self.saved.exists():
            return []
        return sorted(int(p.name[5:]) for p in self.saved.iterdir() if p.name.startswith("step-"))

    def path(self, step):
        return self.saved / f"step-{step:08}"

    def is_whole(self, step):
        done = subprocess.run([self.moesh, "inspect", str(self.path(step)), "--check"],
                              capture_output=True, timeout=TIMEOUT, text=True)
        if done.returncode not in (0, 1):
            self.failures.append(f"inspect ended with {done.returncode}: {done.stderr}")
        return done.returncode == 0

    def newest_whole(self):
        return next((s for s in reversed(self.steps()) if self.is_whole(s)), 0)

    # Each fault gives what its runs ended with, and what they may; negative: the signal that killed
    # one. No code at all: there was nothing to do.
    def none(self):
        return [self.wait(self.start())], {0}

    def killed(self):
        run = self.start()
        time.sleep(self.random.uniform(0.1, 2))
        run.kill()
        return [self.wait(run)], {0, -signal.SIGKILL}

    def told_to_stop(self):
        run = self.start()
        time.sleep(self.random.uniform(0.5, 2))
        run.send_signal(self.random.choice([signal.SIGTERM, signal.SIGINT]))
        # Before it trains, a signal does what it always does.
        return [self.wait(run)], {0, 4, -signal.SIGTERM, -signal.SIGINT}

    def stopped_for_a_while(self):
        run = self.start()
        time.sleep(self.random.uniform(0.1, 1))
        run.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        run.send_signal(signal.SIGCONT)
        time.sleep(self.random.uniform(0.1, 1))
        run.kill()
        return [self.wait(run)], {0, -signal.SIGKILL}

    def doubled(self):
        runs = [self.start(), self.start()]
        codes = [self.wait(run) for run in runs]
        if 0 not in codes:
            self.failures.append(f"doubled: neither of the two has trained: {codes}")
        return codes, {0, 2}

    def damaged(self):
        steps = [s for s in self.steps() if self.is_whole(s)]
        if len(steps) < 2:
            return [], set()
        files = [p for p in self.path(steps[-1]).rglob("*") if p.is_file()]
        file = self.random.choice(files)
        data = bytearray(file.read_bytes())
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        file.write_bytes(data)
        self.newest = steps[-2]
        run = self.start()
        time.sleep(self.random.uniform(0.5, 3))
        run.kill()
        return [self.wait(run)], {0, -signal.SIGKILL}

    def full_disk(self):
        limit = self.random.choice([20_000, 100_000, 300_000])
        set_limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run = self.start(preexec_fn=set_limit)
        return [self.wait(run)], {0, 7}

    def lying_disk(self):
        faults = f"write .saving- {self.random.randrange(1, 400)} 1 flip"
        return [self.wait(self.start(program=self.faulty, faults=faults))], {0, 7}

    def misread(self):
        faults = f"read {self.saved}/step- {self.random.randrange(1, 30)} 1 flip"
        return [self.wait(self.start(program=self.faulty, faults=faults))], {0}

    def failing_disk(self):
        call = self.random.choice(["open", "read", "write", "sync", "rename", "list", "status",
                                   "any"])
        faults = f"{call} {self.saved} {self.random.randrange(1, 300)} " \
                 f"{self.random.choice([1, 3, 1000])} {self.random.choice([5, 28, 116, 13])}"
        return [self.wait(self.start(program=self.faulty, faults=faults))], {0, 7}

    def dies_in_a_call(self):
        faults = f"any {self.saved} {self.random.randrange(1, 600)} 1 kill"
        return [self.wait(self.start(program=self.faulty, faults=faults))], {0, -signal.SIGKILL}

    def loses_a_rank(self):
        """Of two processes under mpirun one is stopped for good, or killed."""
        run = self.start(before=(shutil.which("mpirun"), "-n", "2"))
        time.sleep(self.random.uniform(1, 4))
        ranks = []
        for pid in (p for p in os.listdir("/proc") if p.isdigit()):
            try:
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[1]) == run.pid:
                    ranks.append(int(pid))
            except OSError:
                pass
        if ranks:
            try:
                os.kill(self.random.choice(ranks),
                        self.random.choice([signal.SIGSTOP, signal.SIGKILL]))
            except ProcessLookupError:
                pass
        return [self.wait(run)], {0, 6, 128 + signal.SIGKILL}

    def check(self, name, codes, allowed):
        found = self.newest_whole()
        for code in codes:
            self.counts[name, code] += 1
            if code not in allowed:
                self.failures.append(f"{name}: exit code {code}")
        if 0 in codes and found != STEPS:
            self.failures.append(f"{name}: a run ended with 0, and {found} is the newest")
        if found < self.newest:
            self.failures.append(f"{name}: {self.newest} was there, and now {found} is the newest")
        self.newest = found
        if found == STEPS:
            self.num_finished += 1
            theirs = self.reference / self.path(STEPS).name
            for file in (p for p in theirs.rglob("*.safetensors")):
                ours = self.path(STEPS) / file.relative_to(theirs)
                if not filecmp.cmp(file, ours, shallow=False):
                    self.failures.append(f"{name}: {file.name} has other bytes than without faults")
            shutil.rmtree(self.saved)
            self.newest = 0
        for log in self.logs if self.failures else []:
            log.seek(0)
            self.failures.append(log.read()[-3000:])
        for log in self.logs:
            log.close()
        self.logs = []

    def run(self, minutes):
        faults = [self.none, self.killed, self.told_to_stop, self.stopped_for_a_while, self.doubled,
                  self.damaged, self.full_disk, self.lying_disk, self.misread, self.failing_disk,
                  self.dies_in_a_call]
        if shutil.which("mpirun"):
            faults.append(self.loses_a_rank)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not self.failures:
            fault = self.random.choice(faults)
            self.check(fault.__name__, *fault())


if __name__ == "__main__":
    moesh, faulty, minutes = sys.argv[1:4]
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else random.randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
        soak = Soak(moesh, faulty, folder, seed)
        soak.run(float(minutes))
    for (name, code), count in sorted(soak.counts.items(), key=str):
        print(f"{name:20} ended with {code!s:>4}: {count}")
    print(f"{soak.num_starts} starts, {soak.num_finished} runs finished with the bytes of an "
          f"undisturbed one, {len(soak.failures)} failures")
    for failure in soak.failures:
        print(failure)
    sys.exit(1 if soak.failures else 0)
