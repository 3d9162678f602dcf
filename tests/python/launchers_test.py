"""python -m moesh, and a script that calls moesh.train, under mpirun and under torchrun, on CPUs:
launchers_test.py {mpirun MPIRUN | torchrun}"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

OPTIONS = ["--mesh=tp=2,ep=2", "--steps=3", "--dtype=float64"]
SCRIPT = """
import sys, moesh
summary = moesh.train(mesh="tp=2,ep=2", steps=3, dtype="float64", quiet=True,
                      metrics={"folder": sys.argv[1]})
holds = moesh.verify(mesh="tp=2,ep=2", dtype="float64")["holds"]
print(f"{len(summary.losses)} losses, holds: {holds}\\n", end="", flush=True)
"""
LAUNCHER = []


def run(command, folder):
    """`command` under the launcher: what it printed, and the losses that it left."""
    done = subprocess.run([*LAUNCHER, *command, folder], capture_output=True, text=True, timeout=250)
    metrics = pathlib.Path(folder.removeprefix("--metrics.folder="), "metrics.jsonl")
    records = metrics.read_text().splitlines() if metrics.exists() else []
    return done, [json.loads(line)["loss"] for line in records]


class Launched(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.script = pathlib.Path(folder.name, "script.py")
        self.script.write_text(SCRIPT)

    def of_threads(self):
        """The losses of the same ranks in threads of one process."""
        folder = f"{self.folder}/threads"
        subprocess.run([sys.executable, "-m", "moesh", "train", *OPTIONS, "--quiet=true",
                        f"--metrics.folder={folder}"], check=True, timeout=250)
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


class Mpirun(Launched):
    def test_the_command_is_one_run_of_all_processes(self):
        done, losses = run([sys.executable, "-m", "moesh", "train", *OPTIONS],
                           f"--metrics.folder={self.folder}/m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("done after 3 steps"), 1, done.stdout)
        self.assertEqual(losses, self.of_threads())

    def test_a_script_is_one_run_of_all_processes(self):
        done, losses = run([sys.executable, str(self.script)], f"{self.folder}/m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()),
                         ["0 losses, holds: True", "3 losses, holds: True"])  # records: process 0
        self.assertEqual(losses, self.of_threads())

    def test_a_mistake_ends_all_processes_with_its_exit_code(self):
        done, losses = run([sys.executable, "-m", "moesh", "train", "--mesh=tp=3"],
                           f"--metrics.folder={self.folder}/m")
        self.assertEqual((done.returncode, losses), (2, []), done.stderr)
        self.assertIn("set parallelism.tensor_parallel_degree to one of", done.stderr)


class Torchrun(Launched):
    CURE = ("torchrun has started 2 processes, and training.device is cpu: without MPI, processes "
            "need a GPU each (--device=cuda). On CPUs start moesh without torchrun, and its ranks "
            "are threads, or with mpirun -n 2")

    def torchrun(self, num, *command):
        LAUNCHER[:] = [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone",
                       f"--nproc-per-node={num}"]
        return run(command[:-1], command[-1])

    def test_processes_without_gpus_are_told_what_to_do(self):
        for command in (["-m", "moesh", "train", *OPTIONS, f"--metrics.folder={self.folder}/m"],
                        [str(self.script), f"{self.folder}/m"]):
            done, losses = self.torchrun(2, *command)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(self.CURE, done.stderr)
            self.assertEqual(losses, [])  # no copies that overwrite each other's files

    def test_strangers_are_kept_out_before_a_gpu_is_looked_for(self):
        done, _ = self.torchrun(2, "-m", "moesh", "train", *OPTIONS, "--device=cuda",
                                f"--metrics.folder={self.folder}/m")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("export MOESH_SECRET=$(openssl rand -hex 16)", done.stderr)

    def test_one_process_has_its_ranks_in_threads(self):
        done, losses = self.torchrun(1, "-m", "moesh", "train", *OPTIONS,
                                     f"--metrics.folder={self.folder}/m")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses, self.of_threads())


if __name__ == "__main__":
    launcher = sys.argv[1]
    LAUNCHER[:] = [*sys.argv[2:], "-n", "2"]
    os.environ.pop("MOESH_SECRET", None)
    unittest.main(argv=[sys.argv[0], launcher.capitalize()], verbosity=2)
