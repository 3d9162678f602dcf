"""Command lines of moesh without a new process for each: to load LibTorch takes half a second.

run([MOESH, ...]) is subprocess.run with the output as text. Where MOESH is `moesh_served`
(tests/moesh_served.cpp, the same command), one process loads the libraries, and each command
line runs in a fork of it; any other program is started anew each time.
"""

import atexit
import os
import pathlib
import resource
import struct
import subprocess
import tempfile

servers = {}


class Server:
    def __init__(self, program, environment=None):
        # OMP_WAIT_POLICY: it starts once, not twice
        self.process = subprocess.Popen(
            [program, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **(environment or {})})

        atexit.register(self.end)

    def end(self):
        self.process.stdin.close()
        self.process.wait()

    def run(self, words, folder, out, err, memory, cpu_seconds, seconds):
        """The exit code, negative for that of a signal; None if it took longer than `seconds`."""
        texts = [folder, out, err, memory, cpu_seconds, seconds, *words]
        texts = [os.fsencode(text) if isinstance(text, os.PathLike) else str(text).encode()
                 for text in texts]
        request = struct.pack("=I", len(texts))
        for text in texts:
            request += struct.pack("=I", len(text)) + text
        self.process.stdin.write(request)
        self.process.stdin.flush()
        status, = struct.unpack("=i", self.process.stdout.read(4))
        return None if status == -1 else os.waitstatus_to_exitcode(status)


def run(words, timeout=300, cwd="."):
    words = [str(word) for word in words]
    program = words[0]
    if pathlib.Path(program).name != "moesh_served":
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, cwd=cwd)
    if program not in servers:
        servers[program] = Server(program)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (pathlib.Path(folder, name) for name in ("out", "err"))
        no_limit = resource.RLIM_INFINITY
        code = servers[program].run(words[1:], os.path.abspath(cwd), out, err, no_limit, timeout,
                                    timeout)
        if code is None:
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())
