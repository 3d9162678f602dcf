#!/usr/bin/env python3
"""Processes that torchrun or srun would have started: torchrun_test.py PROGRAM MOESH [CASE]

They are started here, with the variables that those launchers set. PROGRAM is comm_tcp_main.
"""
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

PROGRAM, MOESH = (os.path.abspath(path) for path in sys.argv[1:3])
SECRET = "a secret of sixteen or more letters"
LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "MOESH_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1}


def srun(rank, size, port):
    return {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank,
            "SLURM_STEP_NODELIST": "localhost", "MOESH_PORT": port}


def start(command, launcher, size=3, secret=SECRET, **settings):
    port, processes = free_port(), []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    for rank in range(size):
        own = {k: str(v) for k, v in launcher(rank, size, port).items()}
        if secret:
            own["MOESH_SECRET"] = secret
        processes.append(subprocess.Popen(command, env={**clean, "OMP_NUM_THREADS": "1", **own},
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                          text=True, **settings))
    return processes


def ends(processes, seconds=240):
    done = []
    for p in processes:
        out, err = p.communicate(timeout=seconds)
        done.append((p.returncode, out, err))
    return done


def conformance():
    for launcher in (torchrun, srun):
        done = ends(start([PROGRAM, "conformance"], launcher))
        assert all(code == 0 for code, _, _ in done), done
        assert done[0][1].count(" holds\n") > 20, done[0]


def killed():
    """The others name the rank whose process is gone, also when the hub is gone with it."""
    for victim in (1, 0):
        processes = start([PROGRAM, "wait", str(victim)], torchrun)
        for p in processes:
            assert "has met the others" in p.stdout.readline()
        time.sleep(0.2)
        processes[victim].kill()
        begun = time.time()
        done = ends(processes)
        assert time.time() - begun < 30, "a deadline was waited for"
        for rank, (code, _, err) in enumerate(done):
            named = code == 1 and f"rank {victim} failed: its process" in err
            assert named or rank == victim, (rank, code, err)


def other_secret():
    processes = start([PROGRAM, "conformance"], torchrun, size=2, secret="")
    for code, _, err in ends(processes):
        assert code == 1 and "MOESH_SECRET" in err and "openssl rand" in err, err


def without_gpus():
    """The program says what to do, and no two copies write one file."""
    for launcher in (torchrun, srun):
        with tempfile.TemporaryDirectory() as folder:
            command = [MOESH, "train", "--steps=1", "--mesh=tp=2", "--checkpoint.enable"]
            for code, out, err in ends(start(command, launcher, size=2, cwd=folder)):
                assert code == 2, (code, out, err)
                for part in (launcher.__name__, "2 processes", "--device=cuda", "mpirun -n 2"):
                    assert part in err, (part, err)
            assert not list(pathlib.Path(folder).rglob("*")), list(pathlib.Path(folder).rglob("*"))


CASES = [conformance, killed, other_secret, without_gpus]
for case in CASES:
    if len(sys.argv) < 4 or sys.argv[3] == case.__name__:
        case()
        print(f"{case.__name__}: holds")
