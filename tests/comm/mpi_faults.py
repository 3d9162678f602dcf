"""Runs comm_mpi_faults under mpirun and judges what the processes logged and how the job ended.

mpi_faults.py MPIRUN PROGRAM FAULT|recover NUM_PROCESSES NUM_RANKS
"""

import os
import re
import subprocess
import sys
import tempfile
import time

mpirun, program, fault = sys.argv[1:4]
num_processes, num_ranks = map(int, sys.argv[4:6])

with tempfile.TemporaryDirectory() as folder:
    log_file = os.path.join(folder, "log")
    begin = time.monotonic()
    done = subprocess.run(
        [mpirun, "-n", str(num_processes), program, fault, str(num_ranks), log_file], timeout=120
    )
    seconds = time.monotonic() - begin
    with open(log_file) as file:
        log = file.read()
print(log)
print(f"exit code {done.returncode} after {seconds:.1f} s")

mistakes = []


def expect(holds, what):
    if not holds:
        mistakes.append(what)


others = set(range(num_ranks)) - {1}
threw = {}  # fault -> ranks
for rank, name in re.findall(r"^rank (\d+) in (\w+) threw: ", log, re.MULTILINE):
    threw.setdefault(name, set()).add(int(rank))
expect("ELSE" not in log and "nothing went wrong" not in log, "a text is not the expected one")
for name, ranks in threw.items():
    expect(others <= ranks, f"not every rank threw in {name}: only {sorted(ranks)}")
if fault == "recover":
    expect(done.returncode == 0, "the job recovered, and ends with an error")
    expect(len(threw) >= 9, f"only {len(threw)} faults were tried")
    for name in threw:
        expect(
            log.count(f"launch in {name} threw: ") == num_processes,
            f"launch did not throw in every process in {name}",
        )
    expect(log.count("recovered") == num_ranks * len(threw), "not every rank came back")
else:
    expect(done.returncode != 0, "the job ends without an error")
    # One that is killed or exits takes the job with it, perhaps before the others have noticed.
    expect(fault in ("killed", "exits") or fault in threw, "nobody threw")
    expect(seconds < 25, "it took longer than the deadline of a wait")

# No process stays behind, not even a stopped one.
for pid in re.findall(r"is process (\d+)", log):
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        mistakes.append(f"process {pid} is still there")

for mistake in mistakes:
    print("MISTAKE:", mistake)
sys.exit(1 if mistakes else 0)
