#!/usr/bin/env python3
"""Compiles a device source and reads what ptxas says of its kernels; needs no GPU.

resources_test.py <nvcc> <root of the tree> <file.cu> [flags of nvcc ...]

Fails if a kernel spills registers or has a stack frame (an array that is not in registers), if ptxas had to put
waits between the multiplications (C75xx), or if there is a trap in a kernel: that is what nvcc makes, without a
word, of code which it may not run on the device, and all that follows is gone.
"""

import pathlib
import re
import subprocess
import sys
import tempfile


def complaints_of(report, ptx):
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    if not kernels and ".entry" in ptx:
        yield "ptxas did not report on any kernel"
    for name, text in zip(kernels, re.split(r"Compiling entry function", report)[1:]):
        for number, what in re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", text):
            if int(number) > 0:
                yield f"{name}: {number} bytes of {what}"
    yield from re.findall(r"\(C75\d\d\).*", report)
    name = ""
    for line in ptx.splitlines():
        match = re.search(r"\.entry (\w+)", line)
        name = match.group(1) if match else name
        if re.match(r"\s*trap;", line):
            yield f"{name}: a trap"


def self_test():
    bad = "Compiling entry function 'k' for 'sm_90a'\n 8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads"
    assert len(list(complaints_of(bad, ""))) == 2
    good = "Compiling entry function 'k' for 'sm_90a'\n 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert not list(complaints_of(good, ".visible .entry k()\n ret;"))
    assert list(complaints_of(good, ".visible .entry k()\n\ttrap;\n"))
    assert list(complaints_of("ptxas info : (C7510) Potential Performance Loss", ""))


def main():
    self_test()
    nvcc, root, source, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a", "-I", root, *flags, "-Xptxas", "-v",
                   "--keep", "--keep-dir", folder, "-cubin", source, "-o", f"{folder}/out.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        report = done.stdout + done.stderr
        if done.returncode != 0:
            sys.exit(report)
        ptx = "".join(path.read_text() for path in pathlib.Path(folder).glob("*.ptx"))
    complaints = list(complaints_of(report, ptx))
    kernels = len(re.findall(r"\.entry", ptx))
    print(f"{pathlib.Path(source).name}: {kernels} kernels, {len(complaints)} complaints")
    for complaint in complaints:
        print(f"  {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
