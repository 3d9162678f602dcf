#!/usr/bin/env python3
"""Runs of the command itself: runs_test.py CASE MOESH [MPIRUN ...]. A case is a function below."""

import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[i] / name) for i, name in ((1, ""), (2, "tools"))]
import bad_input_test  # noqa: E402
import compare_runs  # noqa: E402
import served  # noqa: E402

TINY = ["--model", "deepseek_v3:tiny", "--dtype", "float64", "--metrics.log_freq", "1"]


def train(command, folder, *options):
    run = served.run([*command, "train", *TINY, "--metrics.folder", str(folder), *options], timeout=240)
    assert run.returncode == 0, f"{command} {options}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout


def same_losses(reference, other, what):
    a, b = compare_runs.read(reference), compare_runs.read(other)
    assert len(a) == len(b) > 0, f"{what}: {len(a)} and {len(b)} steps"
    for x, y in zip(a, b):
        assert (x["loss"], x["grad_norm"]) == (y["loss"], y["grad_norm"]), f"{what}: {x} is not {y}"


def mpi_gives_the_bits_of_threads(tmp, moesh, *mpirun):
    """The same program on processes: bit-equal losses and gradient norms in fp64."""
    pipeline = ["--training.gradient_accumulation_steps=3", "--model.num_layers=4",
                "--model.tie_embeddings=true"]
    for name, ranks, mesh, more in (
            ("four", 4, "dp_shard=2,tp=2,ep=2", []),
            ("eight", 8, "dp_shard=2,cp=2,tp=2,ep=2,etp=2", []),
            ("nodes", 8, "dp_shard=4,tp=2,ep=4,etp=2",
             ["--parallelism.ranks_per_node=4", "--parallelism.moe_dispatcher=two_hops"]),
            ("pipeline", 4, "pp=2,tp=2",
             [*pipeline, "--parallelism.pipeline_parallel_schedule=zbv"]),
            ("long_pipeline", 4, "pp=4",
             [*pipeline, "--parallelism.pipeline_parallel_schedule=zero_bubble"])):
        options = ["--mesh", mesh, "--steps", "8", "--data.sequence_length", "13", *more]
        train([moesh], tmp / f"threads_{name}", *options)
        train([*mpirun, "-n", str(ranks), moesh], tmp / f"mpi_{name}", *options)
        same_losses(tmp / f"threads_{name}", tmp / f"mpi_{name}", mesh)


def runs_repeat(tmp, moesh):
    """The same run twice has the same bits, whatever the timing."""
    for name in ("a", "b"):
        train([moesh], tmp / name, "--mesh", "dp_shard=2,tp=2,ep=4", "--steps", "6")
    same_losses(tmp / "a", tmp / "b", "two runs")


def odd_lengths_train(tmp, moesh):
    """13 tokens over cp 2 x tp 2, and 3 tokens over tp 4, follow one rank."""
    for length, mesh, dp in ((13, "cp=2,tp=2,ep=2", 1), (3, "dp_shard=2,tp=4,ep=4", 2)):
        options = ["--steps", "5", "--data.sequence_length", str(length)]
        train([moesh], tmp / f"one{length}", *options, "--data.batch_size", str(3 * dp))
        train([moesh], tmp / f"mesh{length}", *options, "--data.batch_size", "3", "--mesh", mesh)
        loss, norm = compare_runs.compare(compare_runs.read(tmp / f"one{length}"), compare_runs.read(tmp / f"mesh{length}"))
        assert loss < 1e-9 and norm < 1e-9, f"{mesh}, {length} tokens: loss {loss}, gradient norm {norm}"


def micro_batches_add_up(tmp, moesh):
    """Two micro-batches of two sequences are one of four, with documents of different lengths and so labels that do not count."""
    text = tmp / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "moesh " * (i % 5 + 1)}) + "\n" for i in range(200)))
    options = ["--steps", "5", "--data.path", str(text), "--data.sequence_length", "11", "--model.vocab_size", "260"]
    train([moesh], tmp / "one", *options, "--data.batch_size", "4")
    train([moesh], tmp / "two", *options, "--data.batch_size", "2", "--training.gradient_accumulation_steps", "2")
    loss, norm = compare_runs.compare(compare_runs.read(tmp / "one"), compare_runs.read(tmp / "two"))
    assert loss < 1e-12 and norm < 1e-9, f"loss {loss}, gradient norm {norm}"


def a_global_batch_is_the_same_on_every_mesh(tmp, moesh):
    """Eight sequences a step, in four, two and one micro-batches; what was derived is said."""
    options = ["--steps", "4", "--training.global_batch_size", "8", "--data.batch_size", "2"]
    for name, mesh, said in (("one", "tp=1", "4 micro-batches of 2 on each of 1 dp rank\n"),
                             ("two", "dp_shard=2,tp=2,ep=2", "2 micro-batches of 2 on each of 2 dp ranks"),
                             ("four", "dp_shard=4", "1 micro-batch of 2 on each of 4 dp ranks")):
        out = train([moesh], tmp / name, *options, "--mesh", mesh)
        assert f"a step of 8 sequences: {said}" in out, out
        loss, norm = compare_runs.compare(compare_runs.read(tmp / "one"), compare_runs.read(tmp / name))
        assert loss < 1e-9 and norm < 1e-9, f"{mesh}: loss {loss}, gradient norm {norm}"


def mixtures_and_validation_are_the_same_on_every_mesh(tmp, moesh):
    """Two files by weight, the loss on a third: one rank, a mesh, and a run that goes on on another mesh."""
    for name in ("web", "code", "held"):
        (tmp / f"{name}.txt").write_text("".join(f"{name} {i * i % 97} " for i in range(3000)))
    toml = tmp / "run.toml"
    toml.write_text(f"""
[model]
vocab_size = 257
[training]
global_batch_size = 8
[data]
batch_size = 2
sequence_length = 16
[[data.source]]
path = "{tmp}/web.txt"
name = "web"
weight = 3
[[data.source]]
path = "{tmp}/code.txt"
[validation]
interval = 4
steps = 2
[[validation.source]]
path = "{tmp}/held.txt"
name = "held out"
""")
    def run(folder, mesh, steps, *options):
        out = train([moesh], tmp / folder, "--config", str(toml), "--mesh", mesh, "--steps", str(steps), "--lr_scheduler.kind=constant",
                    *options)
        return out, [json.loads(line) for line in (tmp / folder / "metrics.jsonl").read_text().splitlines()]

    out, one = run("one", "tp=1", 8)
    assert "2 sources" in out and "web (75 %)" in out and "validation on held out: loss" in out, out
    assert [line["step"] for line in one if "validation" in line] == [4, 8], one
    _, mesh = run("mesh", "dp_shard=2,tp=2,ep=2", 8)
    kept = ["--checkpoint.enable", "--checkpoint.folder", str(tmp / "kept")]
    run("again", "dp_shard=4", 5, *kept)
    _, again = run("again", "tp=2,ep=2", 8, *kept)
    for what, other in (("mesh", mesh), ("resumed on another mesh", again)):
        for a, b in zip(one, other, strict=True):
            assert abs(a["loss"] - b["loss"]) < 1e-9 * a["loss"], f"{what}: {a} {b}"
        for step in (4, 8):
            a, b = (lines[step - 1].get("validation") for lines in (one, other))
            assert b, f"{what}: no validation after step {step}"
            assert abs(a["held out"]["loss"] - b["held out"]["loss"]) < 1e-9, f"{what}: {a} {b}"
    assert one[7]["validation"]["held out"]["perplexity"] > 1


def fails(command, *texts):
    run = served.run(command, timeout=60)
    assert run.returncode == 2, f"{command}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    for text in texts:
        assert text in run.stderr, f"{command}: no '{text}' in\n{run.stderr}"


def bad_values_name_the_option(tmp, moesh):
    """Through the command, as a user meets them."""
    for command in ("train", "verify", "print-config"):
        fails([moesh, command, "--mesh", "tp=2,ep=3"], "parallelism.expert_parallel_degree is 3 (command line, --mesh)")
        fails([moesh, command, "--mesh", "tp=3"], "num_heads", "parallelism.tensor_parallel_degree is 3")
        fails([moesh, command, "--mesh", "tp=2,tp=4"], "the axis tp has two sizes")
        fails([moesh, command, "--data.batch_size=0"], "data.batch_size is 0 (command line)")
        for key, value in (("num_layers", "1000000000000"), ("v_dim", "0"), ("num_heads", "0"), ("kv_lora_rank", "-3"),
                           ("vocab_size", "-1"), ("num_experts", "-8"), ("norm_eps", "-1"), ("routed_scale", "nan")):
            fails([moesh, command, f"--model.{key}={value}"], f"model.{key} is ", "(command line); it takes ")
    fails([moesh, "verify", "--sweep", "2", "--data.sequence_length=-5"], "data.sequence_length is -5")
    fails([moesh, "verify", "--sweep", "2", "--optimizer.name=bar"], "optimizer.name")
    fails([moesh, "verify", "--sweep", "2", "--mesh", "tp=2"], "--sweep goes through every mesh of 1 to 2 ranks", "leave one of them out")
    fails([moesh, "verify", "--shard", "1/2"], "give it, as in --sweep 8")
    fails([moesh, "verify", "--sweep", "2", "--sample-seed", "3"], "there is no --sample")
    fails([moesh, "verify", "--sweep", "2", "--shard", "3/2"], "--shard is '3/2'")
    fails([moesh, "verify", "--json", "--dtype", "float64"], "--json needs a value")
    fails([moesh, "demo", "--steps", "3"], "takes no options")
    for memory in ("80", "80 gigabytes", "-1GiB"):
        fails([moesh, "estimate", "--memory", memory], f"--memory is '{memory}'; it takes a number with its unit, such as 80GiB")
    assert served.run([moesh, "estimate", "--memory", "80GiB"]).returncode == 0


def names_of_a_hub_are_not_downloaded(tmp, moesh):
    """Wherever a folder or a tokenizer is named, the way to get it is said."""
    (tmp / "a.txt").write_text("text\n" * 100)
    text = ["--data.path", str(tmp / "a.txt"), "--model.vocab_size=257", f"--metrics.folder={tmp}"]
    for command in (["train", "--model", "hf:org/name"], ["train", "--checkpoint.initial_load=org/name"],
                    ["train", *TINY, *text, "--checkpoint.initial_load=org/name"],
                    ["train", *TINY, *text, "--data.tokenizer=org/name"], ["train", *TINY, *text, "--lora.adapter=org/name"],
                    ["generate", "org/name", "--prompt-ids", "1"], ["convert", "org/name", str(tmp / "out")],
                    ["tokenize", "--tokenizer", "org/name", "--out", str(tmp / "out"), str(tmp / "a.txt")]):
        fails([moesh, *command], "org/name", "moesh downloads nothing", "`hf download org/name --local-dir name`")


def a_folder_has_no_size(tmp, moesh):
    """A model of config.json is called by its name, not by a built-in size, and its run goes on."""
    def of_run(name, *options):
        folder = tmp / name
        run = served.run([moesh, "train", "--checkpoint.enable", f"--checkpoint.folder={folder}", f"--metrics.folder={folder}", *options], timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
        return folder

    def last(folder):
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])

    first = of_run("first", "--model=mixtral:tiny", "--steps=1", "--dtype=float64") / "step-00000001"
    assert served.run([moesh, "convert", first, tmp / "source"]).returncode == 0
    model = f"--model=hf:{tmp / 'source'}"
    folder = of_run("run", model, "--steps=3", "--dtype=float64", "--checkpoint.interval=1")
    at, whole = folder / "step-00000001", last(folder)
    for step in (2, 3):
        shutil.rmtree(folder / f"step-{step:08}")
    of_run("run", "--config", at / "run.toml")
    assert last(folder)["step"] == 3 and last(folder)["loss"] == whole["loss"], (last(folder), whole)
    inspected, printed = (served.run([moesh, *command]).stdout for command in (
        ("inspect", at), ("print-config", model)))
    assert "model: mixtral\n" in inspected and f"# {tmp / 'source' / 'config.json'}\n" in printed, inspected + printed
    for checkpoint in (at, folder / "step-00000003"):
        for text in (inspected, printed, *((checkpoint / name).read_text() for name in ("moesh.json", "run.toml"))):
            assert "tiny" not in text, text


def nothing_is_written_nowhere(tmp, moesh):
    """An empty metrics.folder is nowhere."""
    run = subprocess.run([moesh, "train", *TINY, "--steps", "1", "--metrics.folder="], cwd=tmp, capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 0, run.stderr
    assert list(tmp.iterdir()) == [], list(tmp.iterdir())


def mpi_verifies(tmp, moesh, *mpirun):
    """Every process has some of the findings, and one prints."""
    for mesh in ("dp_shard=2,tp=2,ep=2", "pp=2,dp_shard=2"):
        command = [*mpirun, "-n", "2", moesh, "verify", "--mesh", mesh, "--dtype", "float64"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.count("1 of 1 meshes hold") == 1, run.stdout + run.stderr
    run = subprocess.run([*mpirun, "-n", "2", moesh, "train", *TINY, "--mesh", "tp=1", "--steps", "1"], capture_output=True, text=True,
                         timeout=120)
    assert run.returncode != 0 and "and there are 2" in run.stderr, run.stdout + run.stderr


def threads_do_not_spin(tmp, moesh):
    """What libgomp says that it read: it must know before main, and what the user sets counts."""
    def spin_count(**variables):
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        run = subprocess.run([moesh, "--version"], env={**inherited, "OMP_DISPLAY_ENV": "verbose", **variables}, capture_output=True,
                             text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return int([line for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line][-1].split("'")[1])
    assert spin_count() == 0, spin_count()
    assert spin_count(OMP_WAIT_POLICY="active") > 1000000
    assert spin_count(GOMP_SPINCOUNT="1234") == 1234


def mpi_start_has_a_deadline(tmp, moesh, mpirun):
    """A process that stops before MPI has started: the other does not wait for ever."""
    script = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && kill -STOP $$; exec {moesh} train --mesh tp=2 --steps 1 ' \
             f"--debug.timeout_seconds=2 --metrics.folder={tmp}"
    run = subprocess.run([mpirun, "-n", "2", "bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 6, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
    assert "MPI has not started within 2 s" in run.stderr, run.stderr


def mpi_lost_rank_leaves_records(tmp, moesh, mpirun):
    """A rank that hangs is named, and the others leave what they did last."""
    command = [mpirun, "-n", "2", moesh, "train", *TINY, "--steps", "1000000", "--max-minutes=5", "--mesh", "tp=2", "--debug.timeout_seconds=2",
               "--metrics.folder", str(tmp)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp / "metrics.jsonl"
    try:
        deadline = time.time() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert time.time() < deadline and run.poll() is None, "the run did not get to its third step"
            time.sleep(0.05)
        ranks = {}
        for pid in (p for p in os.listdir("/proc") if p.isdigit()):
            try:
                parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == run.pid:
                    variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    ranks[[v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")][0][-1:]] = int(pid)
            except (OSError, IndexError):
                pass
        os.kill(ranks[b"1"], signal.SIGSTOP)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 6, f"exit code {run.returncode}\n{out}{err}"
    assert "rank 1 did not arrive within 2 s" in err, err
    record = (tmp / "flight-rank-00000.txt").read_text()
    assert 10 < record.count("\n") <= 256 and "NOT ENDED" in record, record


def mpi_a_data_error_of_one_rank(tmp, moesh, mpirun):
    """Bad data that one process meets is an error of usage for all of them, and not a lost rank."""
    # Sequences of 8, of which dp rank 1 gets the second of each step.
    ids = [1] * 9 + [60000] * 8 + [1] * 40
    (tmp / "x.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    (tmp / "x.idx").write_bytes(bad_input_test.index([len(ids)], [0], [0, 1]))
    run = subprocess.run([mpirun, "-n", "2", moesh, "train", *TINY, "--mesh=dp_shard=2", "--steps=1",
                          "--data.sequence_length=8", "--data.batch_size=1", "--data.shuffle=false",
                          f"--data.path={tmp}/x.bin", "--metrics.folder="], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
    assert "has the id 60000" in run.stderr, run.stderr
    assert run.stderr.count("moesh: data error") == 2, run.stderr


def mpi_killed_in_a_schedule(tmp, moesh_with_faults, mpirun):
    """A process that stops or dies in the middle of a schedule: what the others were at is said,
    with rank, stage, micro-batch and action, before the deadline, whoever ends them."""
    def run(name, at, *launch):
        folder = tmp / name
        begin = time.monotonic()
        done = subprocess.run(
            [mpirun, *launch, "-n", "4", moesh_with_faults, "train", *TINY, "--mesh=pp=4", "--steps=1000",
             "--model.num_layers=4", "--training.gradient_accumulation_steps=6",
             "--parallelism.pipeline_parallel_schedule=1f1b", f"--metrics.folder={folder}",
             f"--debug.timeout_seconds={5 if launch else 60}"],
            capture_output=True, text=True, timeout=120, env={**os.environ, "MOESH_SIGNAL_AT": at})
        # Two steps, the deadline, and what mpirun takes.
        assert time.monotonic() - begin < 45, f"{time.monotonic() - begin} s\n{done.stderr}"
        assert (folder / "metrics.jsonl").read_text().count("\n") == 2, "it was not in the third step"
        records = {int(f.stem[-5:]): f.read_text() for f in folder.glob("flight-rank-*.txt")}
        return done, records

    # Rank 2 is at the backward of micro-batch 1: rank 3 waits for nobody yet, or for an activation,
    # and ranks 1 and 0 for this gradient and the one after it.
    waits = "recv of [0-9]+ bytes on group 'pp', in backward of stage 1 for micro-batch 1"
    stop = f"rank 1 of pp, backward of stage 1 for micro-batch 1: rank 1 waited in recv.* rank 2 did not arrive within 5 s"
    stopped, records = run("stopped", f"B2.1 3 {signal.SIGSTOP.value} 2", "--tag-output")
    assert stopped.returncode == 6, f"{stopped.returncode}\n{stopped.stderr}"
    assert re.search(stop, stopped.stderr), stopped.stderr
    for rank in (0, 1, 3):
        assert re.search(rf"rank {rank} of pp, \w+ of stage {rank} for micro-batch \d", stopped.stderr), \
            f"rank {rank} does not say what it was at\n{stopped.stderr}"
    assert re.search(f"NOT ENDED and is WAITED FOR  {waits}", records[1]), records[1]

    # mpirun ends the others itself, long before their deadline; its exit code is that of the signal.
    killed, records = run("killed", f"B2.1 3 {signal.SIGKILL.value} 2")
    assert killed.returncode == 128 + signal.SIGKILL, f"{killed.returncode}\n{killed.stderr}"
    said = rf"told to stop by signal {signal.SIGTERM.value} while rank 1 has waited [0-9.e-]+ s in {waits}"
    assert re.search(said, killed.stderr), killed.stderr
    assert re.search(f"NOT ENDED and is WAITED FOR  {waits}", records[1]), records[1]


def mpi_warns_of_slow_saves(tmp, moesh_with_faults, mpirun):
    """mpirun kills its processes a second after SIGTERM unless it is told otherwise: a save that
    takes longer is warned of, also where it is in the background."""
    for number, (mode, limit, warns) in enumerate((
            ("--checkpoint.async=false", None, True), ("--checkpoint.async", None, True),
            ("--checkpoint.async", "60", False), ("--checkpoint.async=false", "60", False))):
        folder = tmp / str(number)
        options = ["--mca", "odls_base_sigkill_timeout", limit] if limit else []
        # Each of the files of a save takes 0.2 s to reach the disk.
        env = {**os.environ, "MOESH_FAULTS": "sync .saving- 1 100000 sleep200"}
        done = subprocess.run(
            [mpirun, *options, "-n", "2", moesh_with_faults, "train", *TINY, "--steps=2",
             "--mesh=tp=2", "--checkpoint.enable", "--checkpoint.interval=1", mode,
             f"--checkpoint.folder={folder}", "--metrics.folder="],
            capture_output=True, text=True, timeout=240, env=env)
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        found = re.findall(r"a step and its save take ([0-9.]+) s, and mpirun kills its processes 1 s",
                           done.stderr)
        assert len(found) == (1 if warns else 0), f"{mode} {limit}: {done.stderr}"
        assert not warns or 1 < float(found[0]) < 100, found
        assert not warns or "odls_base_sigkill_timeout" in done.stderr, done.stderr


def interrupt_ends_after_the_step(tmp, moesh):
    """SIGINT: the step is finished and written down, the summary is printed, the exit code is 4."""
    metrics = tmp / "run" / "metrics.jsonl"
    run = subprocess.Popen([moesh, "train", *TINY, "--steps", "1000000", "--max-minutes=5", "--mesh", "tp=2,ep=2", "--metrics.folder", str(tmp / "run")],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.time() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert time.time() < deadline and run.poll() is None, "the run did not get to its third step"
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert run.returncode == 4, f"exit code {run.returncode}\n{out}{err}"
    assert steps == list(range(1, len(steps) + 1)), steps
    assert f"stopped after {len(steps)} steps" in out, out[-500:]


def main():
    case, moesh, rest = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as tmp:
        globals()[case](pathlib.Path(tmp), moesh, *rest)


if __name__ == "__main__":
    main()
