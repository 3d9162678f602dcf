#!/usr/bin/env python3
"""How the command ends: every exit code of the table in moesh/base/error.h, and its message.

exit_codes_test.py CASE MOESH
"""
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import bad_input_test

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served as served_moesh  # noqa: E402

RUN = ["train", "--data.sequence_length=8", "--data.batch_size=1"]


def run(moesh, *args, code, **options):
    if options:
        options = {"stdout": subprocess.PIPE, **options}
        done = subprocess.run([moesh, *map(str, args)], stderr=subprocess.PIPE, text=True,
                              timeout=120, **options)
    else:
        done = served_moesh.run([moesh, *args], timeout=120)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == code, f"moesh {args}: exit code {done.returncode}, not {code}\n{said}"
    return said


def train(moesh, tmp, *args, code, **options):
    return run(moesh, *RUN, f"--metrics.folder={tmp}/metrics", "--checkpoint.enable",
               f"--checkpoint.folder={tmp}/saved", *args, code=code, **options)


def the_table_is_in_the_help_and_on_the_page(tmp, moesh):
    listed = set(re.findall(r"(\d) [a-z]", run(moesh, "help", code=0).split("exit codes:")[1]
                            .split("\n\n")[0].replace("\n", " ")))
    assert listed == set("01234567"), listed
    page = (pathlib.Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert set(re.findall(r"^\| (\d) \|", page, re.M)) == listed, "docs/reliability.md differs"


def does_not_hold_and_usage(tmp, moesh):
    train(moesh, tmp, "--steps=1", code=0)
    saved = tmp / "saved" / "step-00000001"
    run(moesh, "inspect", saved, "--check", code=0)
    (saved / "extra.bin").write_text("x")
    assert "extra.bin" in run(moesh, "inspect", saved, "--check", code=1)
    said = train(moesh, tmp, "\x1b[31mred", code=2)
    assert "\x1b" not in said and "\\x1b[31mred" in said, repr(said)
    assert "stepz" in train(moesh, tmp, "--training.stepz=1", code=2)
    assert "nowhere" in train(moesh, tmp, "--data.path=/nowhere", code=2)
    for option in "--steps=3", "--sweep=2", f"--json={tmp}/x", f"--dump={tmp}/x":
        said = run(moesh, "verify", "--golden", "g", *option.split("="), code=2)
        assert f"{option.replace('=', ' ')} and --golden g: " in said, said


def stopped(tmp, moesh):
    assert "stopped after 1 step:" in train(moesh, tmp, "--steps=9999999", "--max-minutes=1e-9",
                                            code=4)


def stopped_at_once(tmp, moesh):
    """A signal counts from the first moments on, long before the run is made."""
    for number, before in (signal.SIGTERM, []), (signal.SIGINT, ["--log-level", "info"]), \
                          (signal.SIGHUP, ["--log-level=warn"]):
        process = subprocess.Popen(
            [moesh, *before, *RUN, "--steps=1000000", "--max-minutes=5", f"--metrics.folder={tmp}/{number}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        nanoseconds = pathlib.Path(f"/proc/{process.pid}/schedstat")
        while int(nanoseconds.read_text().split()[0]) < 40_000_000:  # LibTorch takes longer
            time.sleep(0.001)
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 4, (process.returncode, said)
        assert "stopped after 1 step:" in said, said
    # What does not train ends as usual.
    process = subprocess.Popen([moesh, "verify", "--sweep=8"], stdout=subprocess.DEVNULL)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == -signal.SIGTERM, process.returncode


def diverged(tmp, moesh):
    said = train(moesh, tmp, "--steps=100", "--optimizer.lr=1e30", "--optimizer.eps=1e-30", code=5)
    assert "the run has diverged: 10 steps in a row" in said, said


def no_threads(tmp, moesh):
    """The system gives one thread more than the process has: two ranks cannot be."""
    # The limit counts all processes of a user and does not hold root, who becomes (MOESH_AS_A_USER)
    # a user without any, and may still read every file.
    limit = lambda: resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
    options = {"preexec_fn": limit, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    for command in "train", "verify":
        said = run(*os.environ["MOESH_AS_A_USER"].split(), moesh, command, "--mesh=tp=2",
                   "--metrics.folder=", code=2, **options)
        assert "of 2 ranks in this process, only 1 got a thread" in said, said


def too_large(tmp, moesh):
    """Sizes that no machine has are an error with bytes, and without a backtrace."""
    for command in "train", "verify":
        for option in ("data.batch_size=1000000000", "model.vocab_size=1000000000",
                       "model.dim=1000000000"):
            if command == "train":
                said = train(moesh, tmp, "--steps=1", f"--{option}", code=2)
            else:
                said = run(moesh, command, f"--{option}", code=2)
            name, value = option.split("=")
            assert re.search(r"\d+ bytes", said) and "this machine has" in said, said
            assert f"{name} is {value} (" in said, said
            assert "frame #" not in said and "Exception raised" not in said, said


def huge_numbers_end_at_once(tmp, moesh):
    """Rules that list what works do not count up to the number."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    said = run(moesh, "print-config", "--model=mixtral:tiny", "--model.num_heads=999999937",
               "--model.num_kv_heads=2", code=2)
    assert "model.num_kv_heads" in said and "one of [1, 999999937]" in said, said
    run(moesh, "print-config", "--mesh=dp_shard=2147483647,ep=2", code=2)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used < 4, f"{used} s"


def conversions(tmp, moesh):
    """A config.json that its files cannot be of is refused at once, and so is a second conversion
    to the same folder. What a killed one has left is taken over, what others made stays."""
    train(moesh, tmp, "--steps=1", code=0)
    model, out = tmp / "saved" / "step-00000001", tmp / "out"
    left = tmp / "out.saving"
    left.mkdir()
    (left / "thesis.txt").write_text("years")
    assert "is in the way" in run(moesh, "convert", model, out, code=7)
    assert (left / "thesis.txt").read_text() == "years"
    (left / "moesh.json").write_text("")
    with open(left / ".lock", "w") as lock:
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, whole)
        said = run(moesh, "convert", model, out, code=2)
        assert "out.saving' is used by" in said, said
        assert (left / "thesis.txt").read_text() == "years"
    run(moesh, "convert", model, out, code=0)
    assert not left.exists() and not (out / ".lock").exists(), list(tmp.iterdir())
    run(moesh, "inspect", out, "--check", code=0)

    (out / "moesh.json").unlink()
    config = json.loads((out / "config.json").read_text())
    for key in "n_routed_experts", "num_hidden_layers":
        (out / "config.json").write_text(json.dumps({**config, key: 10**9}))
        start = time.monotonic()
        said = run(moesh, "convert", out, tmp / "huge", code=2)
        assert "1000000000" in said, said
        assert time.monotonic() - start < 10, f"{key}: {time.monotonic() - start} s"


def a_configuration_through_a_pipe(tmp, moesh):
    line = f"{moesh} print-config --config <(printf '[training]\\nsteps = 77\\n')"
    said = run("/bin/bash", "-c", line, code=0)
    assert re.search(r"steps = 77 ", said), said


def paths_that_cannot_be(tmp, moesh):
    """A path that no file system takes is an error of usage, with its name."""
    long, below = "n" * 5000, tmp / "file" / "x"
    (tmp / "file").write_text("")
    train(moesh, tmp, "--steps=1", code=0)
    model = tmp / "saved" / "step-00000001"
    for path in long, below:
        for words in (["inspect", path], ["compare", path, path], ["convert", path, tmp / "o"],
                      ["convert", model, path], ["train", "--steps=1", f"--data.path={path}"],
                      ["print-config", f"--data.path={path}"], ["verify", "--golden", path],
                      ["train", f"--checkpoint.initial_load={path}"], ["report", path],
                      ["report", f"{path}.json"], ["verify", "--mesh=tp=2", "--dump", path]):
            done = served_moesh.run([moesh, *words], timeout=120)
            assert done.returncode in (2, 7), f"{words[:1]}: {done.returncode} {done.stderr[-800:]}"


def saved_model(tmp, moesh, more=()):
    """A folder of a model without a manifest, as others have them, and its config.json."""
    train(moesh, tmp, "--steps=1", "--model=mixtral:tiny", *more, code=0)
    folder = tmp / "saved" / "step-00000001"
    (folder / "moesh.json").unlink()
    return folder, json.loads((folder / "config.json").read_text())


def not_finite(tmp, moesh):
    """NaN and inf in the weights, and keys of config.json that no model can have, are named."""
    folder, config = saved_model(tmp, moesh)
    model, begin = f"--model=hf:{folder}", ["--metrics.folder=", "--steps=1"]
    for key, value in (("rms_norm_eps", -1), ("rms_norm_eps", 0), ("rope_theta", 0),
                       ("initializer_range", -0.5), ("router_aux_loss_coef", -1)):
        (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": None,
                                                        key: value}))
        said = run(moesh, "train", model, *begin, code=2)
        assert "config.json" in said and f"{key} is {value}; it takes" in said, said
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:8 + length])
    for number, name in ((float("nan"), "model.layers.0.block_sparse_moe.gate.weight"),
                         (float("inf"), "lm_head.weight"),
                         (float("-inf"), "model.layers.1.input_layernorm.weight")):
        at = 8 + length + header[name]["data_offsets"][1] - 4  # its last number
        file.write_bytes(whole[:at] + struct.pack("<f", number) + whole[at + 4:])
        for command in (["train", model, *begin], ["train", model, "--mesh=tp=2,ep=2", *begin],
                        ["generate", folder, "--prompt-ids=1,2"]):
            said = run(moesh, *command, code=2)
            assert f"tensor '{name}' has NaN or inf" in said, said
    file.write_bytes(whole)
    run(moesh, "train", model, *begin, code=0)


def a_limit_on_memory(tmp, moesh):
    """ulimit -v: a sentence, wherever memory ends: while libraries are loaded, before main, in a
    thread of a rank, in a library that does not look. Never a verdict, or half of an answer."""
    sentence = re.compile(r"moesh: \w+ error: .*(ulimit|memory)|.*failed to map segment")
    folder, _ = saved_model(tmp, moesh)
    mesh, all_codes = ["--mesh=tp=2", "--metrics.folder="], []
    for command in ([*RUN, "--steps=1", *mesh], ["verify", *mesh],
                    ["generate", folder, "--prompt-ids=1,2", "--max-new-tokens=2", *mesh]):
        codes = []
        for mib in range(360, 1000, 64):
            limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
            done = subprocess.run([moesh, *command], capture_output=True, text=True, timeout=120,
                                  preexec_fn=limit)
            codes.append(done.returncode)
            # A library ends the process by itself, which nothing can catch.
            if done.returncode in (0, -signal.SIGSEGV, -signal.SIGABRT):
                continue
            last = (done.stderr.strip() or "nothing").splitlines()[-1]
            assert done.returncode in (2, 3, 127) and sentence.match(last), f"{mib} MiB: {done}"
        assert codes[0] != 0 == codes[-1] and codes.count(2) > 0, (command, codes)
        all_codes += codes
    assert sum(code < 0 for code in all_codes) < len(all_codes) / 4, all_codes


def served(tmp, moesh, **more):
    """moesh report --serve of a run, and its port."""
    run(moesh, *RUN, "--steps=1", f"--metrics.folder={tmp}/served", code=0)
    server = subprocess.Popen([moesh, "report", f"{tmp}/served", "--serve", "0"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    return server, int(re.match(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline()).group(1))


def a_fault_under_a_limit_on_memory(tmp, moesh):
    """A SIGSEGV is not told as lack of memory where there is plenty."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
    server, _ = served(tmp, moesh, preexec_fn=limit)
    server.send_signal(signal.SIGSEGV)
    _, said = server.communicate(timeout=30)
    assert server.returncode == -signal.SIGSEGV and "memory" not in said, (server.returncode, said)


def a_server_without_descriptors(tmp, moesh):
    """It waits until it may open one more, and does not spin meanwhile."""
    server, port = served(tmp, moesh)
    used = len(os.listdir(f"/proc/{server.pid}/fd"))
    hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, hard))
    seconds = lambda: sum(map(int, pathlib.Path(f"/proc/{server.pid}/stat").read_text()
                              .rsplit(")")[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as browser:
        before = seconds()
        time.sleep(2)
        assert seconds() - before < 0.5, seconds() - before
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
        browser.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert browser.recv(12) == b"HTTP/1.1 200"
    server.terminate()
    assert server.wait(20) == 0


def closed_streams(tmp, moesh):
    """Nothing that is printed lands in a file that has the number of a closed stream."""
    command = f"{moesh} train --steps=3 --metrics.folder={tmp}/m --metrics.log_freq=1 " \
              f"--checkpoint.enable --checkpoint.folder={tmp}/saved --data.batch_size=1"
    run("/bin/bash", "-c", f"exec {command} <&- >&- 2>&-", code=0)
    lines = (tmp / "m" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3], lines
    for file in [*tmp.rglob(".lock"), *tmp.rglob("*.json*")]:
        assert "loss:" not in file.read_text(), file
    run("/bin/bash", "-c", f"exec {moesh} inspect {tmp}/saved/step-00000003 --check >&-", code=0)


def a_console_that_is_gone(tmp, moesh):
    """moesh train | head: printing ends, and training does not."""
    for name, streams in (("out", {"stdout": subprocess.PIPE}),
                          ("both", {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT})):
        process = subprocess.Popen(
            [moesh, *RUN, "--steps=40", "--metrics.log_freq=1", "--log-level=debug",
             f"--metrics.folder={tmp}/{name}", "--checkpoint.enable",
             f"--checkpoint.folder={tmp}/{name}/saved"], **{"stderr": subprocess.PIPE, **streams})
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read().decode() if process.stderr else ""
        assert process.wait(120) == 0, (process.returncode, error)
        assert (tmp / name / "saved" / "step-00000040" / "moesh.json").exists(), name
        assert (tmp / name / "metrics.jsonl").read_text().count("\n") == 40, name
        assert "storage error" not in error, error


def signals_that_come_again(tmp, moesh_with_faults):
    """SIGTERM twice within a moment is one; seconds later it ends the process at once."""
    def start(name, sleep):
        process = subprocess.Popen(
            [moesh_with_faults, *RUN, "--steps=1000000", "--max-minutes=5",
             f"--metrics.folder={tmp}/{name}", "--checkpoint.enable",
             f"--checkpoint.folder={tmp}/{name}/saved", "--checkpoint.interval=1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "MOESH_FAULTS": f"sync .saving- 1 100000 sleep{sleep}"})
        metrics = tmp / name / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        return process
    for name, signals in ("twice", [signal.SIGTERM] * 2), ("thrice", [signal.SIGINT] * 3), \
                         ("hangup", [signal.SIGHUP, signal.SIGHUP]):
        process = start(name, 50)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)
        assert process.wait(60) == 4, (name, process.returncode, process.stderr.read())
        last = (tmp / name / "metrics.jsonl").read_text().count("\n")
        assert (tmp / name / "saved" / f"step-{last:08}" / "moesh.json").exists(), name
    process = start("later", 1000)
    for pause in 0.02, 1.3, 0:
        process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    assert process.wait(60) == -signal.SIGTERM, process.returncode


def outputs(tmp, moesh):
    """What an option names to be written: a full disk is 7, a pipe is not waited for."""
    train(moesh, tmp, "--steps=1", code=0)
    os.mkfifo(tmp / "pipe")
    for command in (["report", tmp / "metrics", "--out"], ["estimate", "--json"],
                    ["verify", "--json"]):
        said = run(moesh, *command, "/dev/full", code=7)
        assert f"{command[-1]}: cannot write '/dev/full': No space left" in said, said
        run(moesh, *command, tmp / "pipe", code=2)
        run(moesh, *command, tmp / "nowhere" / "x", code=2)
    (tmp / "metrics" / "starts.jsonl").unlink()
    os.mkfifo(tmp / "metrics" / "starts.jsonl")
    assert "it is a pipe" in run(moesh, "report", tmp / "metrics", code=2)


def names_are_escaped(tmp, moesh):
    """What others have named does not control the terminal, and does not look like our lines."""
    folder, config = saved_model(tmp, moesh, more=["--model.vocab_size=256"])
    leader, terminal = pty.openpty()
    run(moesh, "generate", folder, "--tokenizer=bytes", "--prompt=a\u009b\u202eb\nc",
        "--max-new-tokens=1", code=0, stdout=terminal)
    said = os.read(leader, 10000).decode(errors="replace")
    assert said.startswith("a\\u009b\\u202eb\r\nc"), repr(said)
    evil, shown = "x\u009b2J\u202e\nmoesh: done\x1b[0m", "x\\u009b2J\\u202e\\x0amoesh: done\\x1b[0m"
    for words in (["inspect", folder], ["train", f"--model=hf:{folder}"]):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": evil}))
        said = run(moesh, *words, code=0 if words[0] == "inspect" else 2)
        assert shown in said and evil not in said, repr(said)
    other = tmp / "a\u202e\nb"
    said = run(moesh, "train", "--steps=1", "--data.sequence_length=8", f"--metrics.folder={other}",
               code=0)
    assert said.count("a\\u202e\\x0ab") >= 3 and str(other) not in said, said
    said = run(moesh, "report", other, f"--out={other}/r.html", code=0)
    assert "a\\u202e\\x0ab/r.html: 1 run" in said, said
    said = run(moesh, "print-config", f"--metrics.folder={other}\u009b", code=0)
    assert "\\u009b" in said and "\u009b" not in said, said


def inputs_of_tokenize(tmp, moesh):
    """A bound on threads, and an input that is replaced while another one is read."""
    (tmp / "tokenizer.json").write_text(bad_input_test.tokenizer_json())
    (tmp / "b.jsonl").write_text('{"text": "as it was"}\n')
    command = ["tokenize", f"--tokenizer={tmp}/tokenizer.json", f"--out={tmp}/out",
               "--format=jsonl"]
    said = run(moesh, *command, tmp / "b.jsonl", "--threads=20000", code=2)
    assert "--threads is 20000; it takes 1 to 1024, and this machine has" in said, said
    process = subprocess.Popen([moesh, *command, "-", tmp / "b.jsonl"], stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    while not list(tmp.glob("out*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    (tmp / "b.jsonl").write_text('{"text": "as it is now"}\n')
    _, said = process.communicate('{"text": "the first"}\n', timeout=60)
    assert process.returncode == 2, said
    assert "b.jsonl was written to, or replaced, while it was read" in said, said
    assert not (tmp / "out.idx").exists()
    said = run(moesh, *command[:2], f"--out={tmp}/other", tmp / "b.jsonl", "--threads=1024", code=0)
    assert "1 document" in said, said


def one_process_of_several(tmp, moesh):
    said = run(moesh, *RUN, "--steps=1", "--metrics.folder=", code=2,
               env={**os.environ, "WORLD_SIZE": "2", "RANK": "0"})
    assert "MASTER_ADDR is not set" in said, said
    said = run(moesh, *RUN, "--steps=1", "--metrics.folder=", code=2,
               env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"})
    assert "WORLD_SIZE is not set" in said, said


def storage(tmp, moesh):
    (tmp / "saved").write_text("a file")
    assert "Not a directory" in train(moesh, tmp, "--steps=1", code=7)
    said = run(moesh, *RUN, "--steps=1", "--metrics.folder=", code=2,
               env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"})
    assert "WORLD_SIZE is not set" in said, said
    (tmp / "saved").unlink()
    with open("/dev/full", "w") as full:
        assert "standard output" in run(moesh, "help", code=7, stdout=full)
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    assert "File too large" in train(moesh, tmp, "--steps=1", code=7, preexec_fn=small)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](pathlib.Path(folder), sys.argv[2])
    print("as it should be")
