"""Ctrl-C and SIGTERM end a run after its step, with its checkpoint, as they end the command; Ctrl-C
ends verify, estimate and compare in the middle."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

# What is killed with this test's own process, and not by it, ends by itself.
MOST_SECONDS = 300
OPTIONS = {"training.steps": 100000, "training.max_minutes": MOST_SECONDS / 60,
           "data.sequence_length": 8, "checkpoint.enable": True,
           "checkpoint.interval": 1000000, "metrics.quiet": True}
RUN = """
import os, signal, sys, moesh
before = signal.getsignal(signal.SIGINT)
try:
    moesh.train({options!r}, mesh="tp=2", on_step=lambda r: print(r["step"], flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGINT) is before
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("and again", flush=True)
"""

# The signal comes with the first sample, before the first step.
EARLY = """
import os, signal, moesh
class Samples:
    def __getitem__(self, index):
        if index == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return [index % 7] * 9
def on_step(record):
    print(record["step"], flush=True)
    if record["step"] == 3:
        os._exit(9)
try:
    moesh.train({options!r}, dataset=Samples(), on_step=on_step)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

# The signal comes while the run is being prepared: its memory is estimated, the model is built. On a
# busy machine it may come before that, and there is no run.
PREPARED = """
import os, signal, threading, time, moesh
def interrupt():
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
def on_step(record):
    print(record["step"], flush=True)
    if record["step"] == 3:
        os._exit(9)
try:
    threading.Thread(target=interrupt).start()
    moesh.train({options!r}, **{{"model.num_layers": 100}}, on_step=on_step)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

# Two runs on threads, of which one takes a second for each step.
TWO = """
import threading, time, moesh
options = {options!r}
def run(name, pause):
    folders = {{"checkpoint.folder": f"{{options['checkpoint.folder']}}/{{name}}",
               "metrics.folder": f"{{options['metrics.folder']}}/{{name}}"}}
    def on_step(record):
        time.sleep(pause)
        if record["step"] == 1:
            print("begun\\n", end="", flush=True)  # whole lines: two threads print
    summary = moesh.train(options, **folders, on_step=on_step)
    print(f"{{name}} {{summary.interrupted}}\\n", end="", flush=True)
threads = [threading.Thread(target=run, args=a) for a in (("fast", 0), ("slow", 1))]
for t in threads:
    t.start()
while any(t.is_alive() for t in threads):
    try:
        for t in threads:
            t.join()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("end", flush=True)
"""

CALL = """
import signal, moesh, torch
{before}
print("begun", flush=True)
try:
    result = {call}
    print("over", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(moesh.estimate()["parameters"] > 0)
"""
# One call after the other in one process, each interrupted at another time.
AGAIN = """
import os, signal, threading, moesh
moesh.estimate()
for seconds in {times}:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            {call}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
VERIFY = 'moesh.verify(mesh="dp_shard=2,tp=2", num_steps=100000)'
SWEEP = 'moesh.verify(sweep=8)'
ESTIMATE = ('moesh.estimate(**{"model.num_layers": 200, '
            '"training.gradient_accumulation_steps": 1000})')
SEARCH = 'moesh.estimate(model="deepseek_v3:671b", search=4096, memory="80GiB")'
COMPARE = 'moesh.compare(*[{"x": torch.zeros(1).expand(2**34)}] * 2)'


class Interrupt(unittest.TestCase):
    def folders(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return {**OPTIONS, "checkpoint.folder": f"{folder.name}/c",
                "metrics.folder": f"{folder.name}/m"}

    def start(self, script):
        script = f"import signal\nsignal.alarm({MOST_SECONDS})\n{script}"
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def steps_of(self, folder):
        """Those of the checkpoints, and how many were taken."""
        saved = pathlib.Path(folder["checkpoint.folder"]).glob("step-*")
        lines = pathlib.Path(folder["metrics.folder"], "metrics.jsonl").read_text().count("\n")
        return [int(path.name.removeprefix("step-")) for path in saved], lines

    def test_ctrl_c_before_the_first_step_ends_the_run_after_it(self):
        options = self.folders()
        child = self.start(EARLY.format(options=options))
        said, errors = child.communicate(timeout=120)
        self.assertEqual(child.returncode, 0, errors)
        steps, taken = self.steps_of(options)
        self.assertEqual(said.splitlines(), ["1", "interrupted"])
        self.assertEqual((steps, taken), ([1], 1))

    def test_ctrl_c_while_a_run_is_prepared_does_not_wait_for_its_end(self):
        child = self.start(PREPARED.format(options=self.folders()))
        said, errors = child.communicate(timeout=120)
        self.assertEqual(child.returncode, 0, errors)
        self.assertIn(said.splitlines(), (["1", "interrupted"], ["interrupted"]))

    def two_runs(self, number):
        options = self.folders()
        child = self.start(TWO.format(options=options))
        for _ in range(2):
            self.assertEqual(child.stdout.readline(), "begun\n")
        child.send_signal(number)
        said, errors = child.communicate(timeout=120)
        for name in ("fast", "slow"):
            steps, taken = self.steps_of({key: f"{options[key]}/{name}" for key in
                                          ("checkpoint.folder", "metrics.folder")})
            self.assertEqual(steps, [taken], (name, errors))
        return child.returncode, said.splitlines()

    def test_sigterm_waits_for_every_run_of_the_process(self):
        code, lines = self.two_runs(signal.SIGTERM)
        self.assertEqual((code, lines), (-signal.SIGTERM, []))

    def test_ctrl_c_ends_every_run_of_the_process_and_raises_once(self):
        code, lines = self.two_runs(signal.SIGINT)
        self.assertEqual(code, 0)
        self.assertEqual(sorted(lines), ["end", "fast True", "interrupted", "slow True"])
        self.assertEqual(lines[-1], "end")

    def test_ctrl_c_ends_what_computes(self):
        for call in (VERIFY, SWEEP, ESTIMATE, SEARCH, COMPARE):
            with self.subTest(call):
                child = self.start(CALL.format(before="", call=call))
                self.assertEqual(child.stdout.readline(), "begun\n")
                time.sleep(1)
                self.assertIsNone(child.poll(), "it is over too soon to be interrupted")
                before = time.monotonic()
                child.send_signal(signal.SIGINT)
                self.assertEqual(child.stdout.readline(), "interrupted\n")
                took = time.monotonic() - before
                said, errors = child.communicate(timeout=60)
                print(f"{took:.2f} s until {call} has ended")
                self.assertEqual((child.returncode, said, errors), (0, "True\n", ""))
                self.assertLess(took, 5, call)

    def test_ctrl_c_ends_an_estimate_wherever_it_is(self):
        """In backward as well, whose thread ends with tensors that Python has seen."""
        times = [0.2 + 0.15 * i for i in range(10)]
        child = self.start(AGAIN.format(times=times, call=ESTIMATE))
        said, errors = child.communicate(timeout=120)
        self.assertEqual((child.returncode, said, errors), (0, "interrupted\n" * len(times), ""))

    def test_what_a_handler_does_not_raise_ends_nothing(self):
        before = 'signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))'
        child = self.start(CALL.format(before=before, call='moesh.verify(mesh="tp=2", num_steps=12)'))
        self.assertEqual(child.stdout.readline(), "begun\n")
        child.send_signal(signal.SIGINT)
        said, errors = child.communicate(timeout=120)
        self.assertEqual((child.returncode, said, errors), (0, "handled\nover\nTrue\n", ""))

    def run_until_step_3(self, args, number):
        """Exit code, the lines that were printed, and the steps of the checkpoints."""
        with tempfile.TemporaryDirectory() as folder:
            options = {**OPTIONS, "checkpoint.folder": f"{folder}/c",
                       "metrics.folder": f"{folder}/m"}
            child = subprocess.Popen([sys.executable, *args(options)], stdout=subprocess.PIPE,
                                     text=True)
            metrics = pathlib.Path(folder, "m", "metrics.jsonl")
            while child.poll() is None:
                if metrics.exists() and metrics.read_text().count("\n") >= 3:
                    break
            child.send_signal(number)
            said, _ = child.communicate(timeout=120)
            saved = pathlib.Path(folder, "c").glob("step-*")
            steps = [int(path.name.removeprefix("step-")) for path in saved]
            taken = metrics.read_text().count("\n")
        return child.returncode, said.splitlines(), steps, taken

    def test_ctrl_c_saves_the_step_and_raises(self):
        code, lines, steps, taken = self.run_until_step_3(
            lambda options: ["-c", RUN.format(options=options)], signal.SIGINT)
        self.assertEqual(code, 0, lines)
        self.assertEqual(lines[-2:], ["interrupted", "and again"])
        self.assertEqual(steps, [taken])
        self.assertEqual(lines[:-2], [str(i + 1) for i in range(taken)])

    def test_sigterm_saves_the_step_and_ends_the_process(self):
        code, lines, steps, taken = self.run_until_step_3(
            lambda options: ["-c", RUN.format(options=options)], signal.SIGTERM)
        self.assertEqual((code, steps), (-signal.SIGTERM, [taken]), lines)
        self.assertNotIn("interrupted", lines)

    def test_the_command_ends_with_its_exit_code(self):
        code, _, steps, taken = self.run_until_step_3(
            lambda options: ["-m", "moesh", "train",
                             *(f"--{k}={str(v)}".replace("=True", "=true")
                               for k, v in options.items())], signal.SIGINT)
        self.assertEqual((code, steps), (4, [taken]))


if __name__ == "__main__":
    unittest.main()
