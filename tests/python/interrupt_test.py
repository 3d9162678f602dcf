"""Ctrl-C and SIGTERM end a run after its step, with its checkpoint, as they end the command."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

OPTIONS = {"training.steps": 100000, "data.sequence_length": 8, "checkpoint.enable": True,
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


class Interrupt(unittest.TestCase):
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
