#!/usr/bin/env python3
"""Makes small mistakes in what can change a number, and finds out what notices them.

    mutate.py [--jobs N] [--files GLOB ...] [--only KIND|NUMBER ...] [--every N] [--quick] [--fresh]
    mutate.py --list | --page

All mistakes of a file are in one copy of it and chosen at run time (sites.py finds them). A copy of
the tree under build-mutate/ is configured and compiled with them; those that the compiler refuses
are taken out. Two programs hold the tests: mutate_checks (those of the test programs that compute
something) and, for what survives it, mutate_sweep (a sweep over meshes, and what takes long). Which
mistakes each test reaches is recorded once, and every mistake is then given to the tests that reach
it, the quickest first, until one fails. What is left has survived: it wants a test, or a reason in
equivalent.txt. On a machine with a GPU a third program, mutate_gpu, judges what is left of the code
that only a GPU runs; without one, that code's survivors count as not run.

Everything else is compiled as `make build` does it: where --files names sources only, ccache has
it.

Results are kept in build-mutate/ by the text of the mistaken file: a run that is stopped goes on
where it was, and a change runs again what it touches. --fresh forgets them.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import sites
from report import Fault, by_folder, match_reasons, put_counts, read_reasons, summary

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent
MISTAKEN = ("moesh/types/*.h", "moesh/spmd/*.h", "moesh/spmd/*.cpp", "moesh/fsdp/*.h",
            "moesh/fsdp/*.cpp", "moesh/nn/*.h", "moesh/nn/*.cpp", "moesh/comm/mesh.h",
            "moesh/comm/mesh.cpp",
            "moesh/pipeline/execute.cpp", "moesh/pipeline/schedule.[hc]*",
            "moesh/pipeline/simulate.[hc]*", "moesh/pipeline/stage_plan.cpp",
            "moesh/base/random.cpp", "moesh/models/*.h", "moesh/models/*.cpp",
            "moesh/optim/*.h", "moesh/optim/*.cpp", "moesh/data/[!t]*.h", "moesh/data/[!t]*.cpp",
            "moesh/config/config.cpp", "moesh/config/merge.cpp", "moesh/config/tables.cpp",
            "moesh/train/build.cpp", "moesh/train/checkpoint_parts.cpp",
            "moesh/train/checkpointer.cpp", "moesh/train/initial_weights.cpp",
            "moesh/train/loop.cpp", "moesh/train/pipeline.cpp", "moesh/train/prefetch.h",
            "moesh/train/routing.cpp", "moesh/train/step.cpp",
            "moesh/train/validation.cpp",
            "moesh/train/metrics/record.[hc]*")
SHOWS_ONLY = ("moesh/data/show_document.cpp",)  # to people, and no number of a run
TABLES = ("moesh/types/layout.h", "moesh/types/mixing.h", "moesh/types/transition.h")
COPIED = ("CMakeLists.txt", "apps", "cmake", "configs", "docs/pipeline", "moesh", "python", "tests")
INCLUDE = '#include "tests/mutants/machine/chosen.h"\n'
PER_FILE = 1000  # numbers of a file's mistakes begin at a multiple of this
# Where all is compiled anew: an index out of range ends the program, where the library knows it.
FLAGS = "-w -D_GLIBCXX_ASSERTIONS"
TRACED_TOGETHER = 20
QUICK_MS = 700  # tests that are tried first, together
BY_THE_CLOCK = "ThatSleep"  # in the names of tests that a busy machine fails


FROM_OUTSIDE = ("signal 9", "signal 15")
PROGRAMS = ("mutate_checks", "mutate_sweep")
ON_A_GPU = "mutate_gpu"  # where there is one
NEEDS_A_GPU = ("moesh/nn/composed_attention.cpp", "moesh/nn/flash_attention.cpp")
GPU_JOBS = 6  # processes that share it
GPU_SECONDS = 60  # the first test of a process begins CUDA
HAS_GPU = os.path.exists("/dev/nvidiactl")


@dataclasses.dataclass
class Mistake:
    number: int
    file: str
    site: sites.Site
    line: int
    state: str = ""  # refused, killed, survived, or nothing yet
    how: str = ""  # failed, crashed, stalled, endless
    by: str = ""  # the test, or the compiler's message
    said: str = ""
    alone: bool = False  # it could not be one of several choices, and was compiled by itself

    def key(self):
        return self.file, self.site.function, self.site.kind, self.site.text

    def describe(self):
        return f"{self.number} {self.file}:{self.line} {self.site.function} | " \
               f"{self.site.kind} | {self.site.text}"


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def write(path, text):
    """A file that is right already keeps its time: what depends on it is not built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


class Folder:
    """build-mutate: the copy of the tree, its build, and what is known."""

    def __init__(self, path, root=ROOT):
        self.root = root
        self.path, self.tree, self.build = path, path / "tree", path / "tree" / "build"
        self.results = path / "results.json"
        self.known = {}
        if self.results.exists():
            self.known = json.loads(self.results.read_text(encoding="utf-8"))
        self.lock = threading.Lock()
        self.saved = time.time()

    def sources(self):
        """The tests: another test may find what survived."""
        return digest(*(p.read_text(encoding="utf-8") for p in sorted(
            (self.root / "tests").rglob("*")) if p.suffix in (".h", ".cpp")))

    def remember(self, key, value):
        with self.lock:
            self.known[key] = value
            if time.time() - self.saved > 5:
                self.save()

    def save(self):
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.results.with_suffix(".partial")
        partial.write_text(json.dumps(self.known), encoding="utf-8")
        partial.replace(self.results)
        self.saved = time.time()


def mistaken_files(root):
    return sorted({p.relative_to(root).as_posix() for g in MISTAKEN for p in root.glob(g)})


def all_mistakes(root):
    mistakes = []
    for base, name in enumerate(mistaken_files(root), 1):
        if name in SHOWS_ONLY:
            continue
        text = (root / name).read_text(encoding="utf-8")
        found = sites.sites_of(text, name in TABLES)
        if len(found) >= PER_FILE:
            raise Fault(f"{name} has {len(found)} sites; raise PER_FILE")
        mistakes += [Mistake(base * PER_FILE + n, name, site, text.count("\n", 0, site.begin) + 1)
                     for n, site in enumerate(found)]
    return mistakes


class Tree:
    """The copy with mistakes, and the lines that each of them owns."""

    def __init__(self, folder, mistakes, chosen=None):
        """Only files of the chosen mistakes have any; nothing: all."""
        self.folder, self.mistakes = folder, mistakes
        self.mistaken = sorted({m.file for m in (mistakes if chosen is None else chosen)})
        self.by_number = {m.number: m for m in mistakes}
        self.by_file = collections.defaultdict(list)
        for m in mistakes:
            self.by_file[m.file].append(m)
        self.texts = {name: (folder.root / name).read_text(encoding="utf-8")
                      for name in mistaken_files(folder.root)}
        self.owners = {}
        for m in mistakes:
            kept = folder.known.get(self.memory(m, "refused"))
            if kept or m.site.is_constant:
                m.state, m.by = "refused", kept or "the compiler evaluates it"

    def memory(self, m, what, *more):
        """What a result of this mistake is kept under."""
        return digest(what, self.texts[m.file], str(m.site.begin), str(m.site.end),
                      m.site.changed, *more)

    def recall_all(self):
        """What became of them when they were judged last, in any run; nothing: they were not."""
        for m in self.mistakes:
            alone = self.folder.known.get(self.memory(m, "alone"), [""])
            m.state = "killed" if self.memory(m, "killed") in self.folder.known else \
                "survived" if self.memory(m, "survived") in self.folder.known else alone[0]
            if m.state == "survived" and m.file in NEEDS_A_GPU and not HAS_GPU:
                m.state = ""

    def copy_all(self):
        wanted = set()
        for name in COPIED:
            path = self.folder.root / name
            for p in [path] if path.is_file() else sorted(path.rglob("*")):
                if p.is_file() and "__pycache__" not in p.parts:
                    wanted.add(p.relative_to(self.folder.root).as_posix())
        for name in wanted:
            if name in self.texts:
                continue
            source, target = self.folder.root / name, self.folder.tree / name
            if not target.exists() or source.read_bytes() != target.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        for p in self.folder.tree.rglob("*"):
            name = p.relative_to(self.folder.tree).as_posix()
            if p.is_file() and name not in wanted and not name.startswith("build"):
                p.unlink()
        for name in self.texts:
            self.render(name)

    def render(self, name):
        live = [(m.number, m.site) for m in self.by_file[name]
                if name in self.mistaken and m.state != "refused"]
        text, owners, dropped = sites.render(self.texts[name], live, INCLUDE if live else "")
        for number in dropped:
            self.refuse(self.by_number[number], "its text overlaps that of another")
        self.owners[name] = owners
        write(self.folder.tree / name, text)

    def refuse(self, m, message):
        m.state, m.by = "refused", message
        self.folder.remember(self.memory(m, "refused"), message)

    def refuse_beside(self, number):
        """Those that are chosen in the same place: judge_alone looks at each."""
        m = self.by_number[number]
        beside = [o for o in self.by_file[m.file] if o.state != "refused" and
                  (o.site.begin, o.site.end) == (m.site.begin, m.site.end)]
        for o in beside:
            self.refuse(o, m.by)
        return {o.number: o.by for o in beside}

    def name_of(self, path):
        try:
            return pathlib.Path(os.path.normpath(self.folder.build / path)).relative_to(
                self.folder.tree).as_posix()
        except ValueError:
            return ""

    def attribute(self, output):
        """Refuses the mistakes that errors of a compiler point at: how many, and errors left."""
        refused, left = {}, []
        for locations, message in errors_in(output):
            owner = next((self.owners[n][line] for n, line in (
                (self.name_of(path), line) for path, line in locations)
                if n in self.owners and line in self.owners[n]), None)
            if owner is None:
                left.append(f"{locations[0][0]}:{locations[0][1]}: {message}")
            else:
                refused.setdefault(owner, message)
        own = {n: t for n, t in refused.items() if "was not declared in this scope" not in t}
        refused = own or refused  # a name that another error took away
        for number, message in refused.items():
            self.refuse(self.by_number[number], message)
        return refused, left


LOCATION = re.compile(r"^(?:In file included from )?(\S+?):(\d+)(?::\d+)?:\s*(.*)$")


def errors_in(output):
    """([(file, line), ...], message) of each error, its own place first, then what led there."""
    found, pending, current = [], [], None
    for line in re.sub(r"\x1b\[[\d;]*[mK]", "", output).splitlines():  # without colours
        match = LOCATION.match(line)
        if not match:
            if "In instantiation" in line or "In function" in line:
                current = None
            continue
        path, number, rest = match.group(1), int(match.group(2)), match.group(3)
        kind = re.match(r"(fatal error|error|warning|note): ?(.*)", rest)
        if kind and "error" in kind.group(1):
            current = ([(path, number)] + pending[::-1], kind.group(2))
            found.append(current)
            pending = []
        elif kind and kind.group(1) == "note" and current:
            current[0].append((path, number))
        elif not kind:
            pending.append((path, number))
    return found


def compiled(folder):
    """(source, object, the compiler's call without its launcher) of each source of the copy; what
    is compiled in a batch has the batch for a source."""
    text = (folder.build / "compile_commands.json").read_text(encoding="utf-8")
    for entry in json.loads(text):
        words = shlex.split(entry["command"])
        first = next(i for i, w in enumerate(words) if re.search(r"(\+\+|cc|clang)[-\d.]*$", w))
        words = words[first:]
        at = words.index("-o")
        target = words[at + 1]
        del words[at:at + 2]
        name = pathlib.Path(entry["file"])
        if name.is_relative_to(folder.tree):
            yield name.relative_to(folder.tree).as_posix(), target, words


def commands_of(folder):
    return {name: words for name, _, words in compiled(folder)}


def folder_of(folder, name):
    """moesh/nn/, of a source and of its batch, which is in the build folder."""
    build = folder.build.relative_to(folder.tree).as_posix()
    return name.removeprefix(build + "/").replace("/batches/", "/").rsplit("/", 1)[0] + "/"


def run(words, cwd):
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", check=False)
    return done.returncode, done.stdout


def configure(tree):
    folder = tree.folder
    options = [f"-DMOESH_MISTAKEN={';'.join(str(folder.tree / n) for n in tree.mistaken)}"]
    if has_headers(tree):
        folder.build = folder.tree / "build-all"
        options.append(f"-DCMAKE_CXX_FLAGS={FLAGS}")
    cache = folder.root / "build" / "CMakeCache.txt"
    known = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE)) \
        if cache.exists() else {}
    torch = os.environ.get("MOESH_TORCH_DIR") or known.get("MOESH_TORCH_DIR")
    venv = folder.root / ".venv"
    if not torch and venv.exists() and not (folder.tree / ".venv").exists():
        (folder.tree / ".venv").symlink_to(venv.resolve())  # within the tree, as ccache has it
    for name, value in (("MOESH_TORCH_DIR", torch), (
            "MOESH_THIRD_PARTY", os.environ.get("MOESH_THIRD_PARTY")
            or known.get("MOESH_THIRD_PARTY"))):
        if value:
            options.append(f"-D{name}={value}")
    code, output = run(
        ["cmake", "-G", "Ninja", "-S", str(folder.tree), "-B", str(folder.build), *options,
         "-DMOESH_TESTS=mutate", "-DMOESH_BENCH=OFF", "-DMOESH_EXAMPLES=OFF", "-DMOESH_CUDA=OFF"],
        folder.root)
    if code:
        raise Fault(f"cmake cannot configure the copy of the tree:\n{output}")


def has_headers(tree):
    return any(n.endswith(".h") for n in tree.mistaken)


def check_syntax(tree, jobs):
    """Takes out what the compiler refuses in the sources, until all of them compile."""
    folder = tree.folder
    code, output = run(["ninja", "-j", str(jobs), "moesh_pch"], folder.build)
    if code:
        raise Fault(output)
    commands = commands_of(folder)
    # The tests of spmd and fsdp use all that their headers offer.
    todo = [n for n in commands if n in tree.mistaken or has_headers(tree) and
            folder_of(folder, n).startswith(("moesh/", "tests/spmd/", "tests/fsdp/")) and
            (folder.tree / n).exists()]  # a generated one is not there before it is built
    checked = folder.known.setdefault("checked", {})
    for round_number in range(1, 30):
        inputs = digest(*(t for n, t in sorted(
            (n, (folder.tree / n).read_text()) for n in tree.texts if n.endswith(".h"))))
        todo = [n for n in todo if checked.get(n) != digest(
            (folder.tree / n).read_text(), inputs)]
        if not todo:
            break
        print(f"  round {round_number}: the syntax of {len(todo)} sources", flush=True)

        def syntax(name):
            return name, run([*commands[name], "-fsyntax-only", "-fno-diagnostics-show-caret",
                              "-fmax-errors=0"], folder.build)

        failed, all_refused, left = [], {}, []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for name, (code, output) in pool.map(syntax, todo):
                if code == 0:
                    checked[name] = digest((folder.tree / name).read_text(), inputs)
                    continue
                failed.append(name)
                refused, rest = tree.attribute(output)
                all_refused.update(refused)
                if not refused:
                    left += [f"{name}: {e}" for e in rest[:3]]
        if not all_refused and left:
            raise Fault("errors that belong to no mistake:\n" + "\n".join(left))
        if round_number >= 3:  # a compiler shows one error of a chain: the others go with it
            for number in list(all_refused):
                all_refused.update(tree.refuse_beside(number))
        for name in {tree.by_number[n].file for n in all_refused}:
            tree.render(name)
        print(f"    {len(all_refused)} refused", flush=True)
        todo = failed
    folder.save()


def build(tree, program, jobs):
    """The program, without what the compiler refuses where headers are used."""
    folder = tree.folder
    for _ in range(10):
        print(f"  building {program}", flush=True)
        code, output = run(["ninja", "-k", "0", "-j", str(jobs), program], folder.build)
        if code == 0:
            return
        refused, left = tree.attribute(output)
        if not refused:
            raise Fault("the copy does not build:\n" + ("\n".join(left[:20]) or output[-4000:]))
        print(f"    {len(refused)} refused", flush=True)
        for name in {tree.by_number[n].file for n in refused}:
            tree.render(name)
    raise Fault("the copy does not build after ten rounds")


def sources_of(folder, program):
    """What is compiled for it."""
    _, output = run(["ninja", "-t", "commands", program], folder.build)
    return {n for n in commands_of(folder) if f" -c {folder.tree / n}" in output}


class Server:
    """mutate_checks, which forks a child for each command."""

    def __init__(self, folder, number, program):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        memory = pathlib.Path("/dev/shm")  # tests save hundreds of checkpoints
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"mutate.{number}.",
                                                dir=memory if memory.exists() else None))
        environment["TEST_TMPDIR"] = str(scratch)
        self.scratch = scratch
        self.process = subprocess.Popen(
            [str(folder.build / "bin" / program)], cwd=scratch, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Fault("the program with the tests has ended")
        return line.rstrip("\n")

    def trace(self, tests):
        self.ask("trace " + ":".join(tests))
        lines = []
        while (line := self.answer()) != "done":
            lines.append(line.split("\t"))
        return lines

    def run(self, number, seconds, tests):
        self.ask(f"run {number} {seconds:.0f} {':'.join(tests)}")
        return (self.answer().split("\t") + ["", ""])[:3]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


@dataclasses.dataclass
class Check:
    name: str
    ms: float
    reaches: set

    def effort(self):
        """Quick tests first, and those that look at little: they look closely."""
        return self.ms * len(self.reaches)


def list_tests(folder, program, tests):
    _, output = run([str(folder.build / "bin" / program), "--gtest_list_tests",
                     f"--gtest_filter={tests}"], folder.path)
    names, suite = [], ""
    for line in output.splitlines():
        line = line.split("#")[0].rstrip()
        if line.startswith("  ") and BY_THE_CLOCK not in line:
            names.append(suite + line.strip())
        elif line.endswith("."):
            suite = line
    return names


def in_parallel(folder, program, jobs, items, work):
    """work(server, item) for each, on `jobs` servers; a fault in one ends all."""
    todo = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    faults = []

    def serve(number):
        server = Server(folder, number, program)
        try:
            while not faults:
                work(server, todo.get_nowait())
        except queue.Empty:
            pass
        except Exception as e:  # shown by the caller
            faults.append(e)
        server.close()

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if faults:
        raise faults[0]


def trace(folder, program, jobs, tests):
    """Runs every test without a mistake: its time, and the mistakes that it reaches. What is known
    of the same program is kept."""
    bits = hashlib.sha256((folder.build / "bin" / program).read_bytes()).hexdigest()
    kept, checks, failures = folder.path / f"{program}.json", {}, []
    if kept.exists():
        saved = json.loads(kept.read_text(encoding="utf-8"))
        if saved["program"] == bits:
            checks = {n: Check(n, ms, set(r)) for n, ms, r in saved["checks"]}

    def work(server, part):
        # Each in a child of its own: what is made once is made by each.
        for line in (line for name in part for line in server.trace([name])):
            if line[0] == "failed":
                failures.append(line[1])
                print(f"    {line[1]} fails without a mistake: {line[2]}", flush=True)
            elif line[0] == "traced":
                checks[line[1]] = Check(line[1], float(line[2]), set(map(int, line[3].split())))
        with folder.lock:
            kept.write_text(json.dumps({"program": bits, "checks": [
                (c.name, c.ms, sorted(c.reaches)) for c in checks.values()
                if c.name not in failures]}), encoding="utf-8")

    names = list_tests(folder, program, tests)
    for _ in range(2):  # a busy machine may stop one for being idle: once more
        unknown = [n for n in names if n not in checks]
        if unknown and not failures:
            print(f"  {len(unknown)} tests without a mistake, and what they reach", flush=True)
            parts = [unknown[i:i + TRACED_TOGETHER]
                     for i in range(0, len(unknown), TRACED_TOGETHER)]
            in_parallel(folder, program, jobs, parts, work)
    if failures:
        raise Fault(f"{len(failures)} tests fail without a mistake")
    if not_ended := sorted(set(names) - set(checks)):
        raise Fault(f"{len(not_ended)} tests did not end: " + " ".join(not_ended[:9]))
    return [checks[n] for n in names]


def try_tests(server, m, number, tests, most_seconds):
    """Runs the tests, which come by their time, until one fails: first a batch of quick ones, then
    what fits into the seconds."""
    quick, total = 0, 0.0
    while quick < len(tests) and total + tests[quick].ms <= QUICK_MS:
        total += tests[quick].ms
        quick += 1
    most = quick
    while most < len(tests) and total + tests[most].ms <= 1000 * most_seconds:
        total += tests[most].ms
        most += 1
    m.state = "survived"
    for batch in (tests[:quick], tests[quick:most]):
        if not batch:
            continue
        seconds = 5 + 5 * sum(c.ms for c in batch) / 1000
        how, by, said = server.run(number, seconds, [c.name for c in batch])
        if said in FROM_OUTSIDE:  # someone else ended it: once more
            how, by, said = server.run(number, seconds, [c.name for c in batch])
        if how != "survived":
            m.state, m.how, m.by, m.said = "killed", how, by, said
            return


def recall(tree, chosen, names):
    """What is known of them: killed, as long as the test is there."""
    for m in chosen:
        kept = tree.folder.known.get(tree.memory(m, "killed"))
        if kept and kept[1] in names:
            m.state, (m.how, m.by, m.said) = "killed", kept


def judge(tree, program, checks, chosen, jobs, most):
    """Gives each mistake to the tests that reach it, the quickest first."""
    folder = tree.folder
    sources = digest(folder.sources(), program, str(most), *(c.name for c in checks))
    by_time = sorted(checks, key=Check.effort)
    todo = []
    for m in chosen:
        if m.state == "killed":
            continue
        if tree.memory(m, "survived", sources) in folder.known:
            m.state = "survived"
        else:
            todo.append(m)
    done = [0, time.time()]

    def work(server, m):
        reaching = [c for c in by_time if m.number in c.reaches]
        try_tests(server, m, m.number, reaching, most)
        if m.state == "killed":
            folder.remember(tree.memory(m, "killed"), (m.how, m.by, m.said))
        else:
            folder.remember(tree.memory(m, "survived", sources), len(reaching))
            folder.remember(tree.memory(m, "survived"), True)
        done[0] += 1
        if done[0] % 50 == 0:
            print(f"    {done[0]} of {len(todo)} in {time.time() - done[1]:.0f} s", flush=True)

    if todo:
        print(f"  {len(todo)} mistakes for {program}; {len(chosen) - len(todo)} are known",
              flush=True)
        in_parallel(folder, program, jobs, todo, work)
    folder.save()


def users(folder):
    """Some sources that include each header: those of nn and models first, and the tests of its own
    folder, which use all that it offers."""
    _, output = run(["ninja", "-t", "deps"], folder.build)
    names = {output: name for name, output, _ in compiled(folder)}
    found, name = collections.defaultdict(set), ""
    for line in output.splitlines():
        if line[:1].strip():
            name = names.get(line.split(":")[0], "")
        elif name and line.strip().startswith(str(folder.tree)):
            found[pathlib.Path(line.strip()).relative_to(folder.tree).as_posix()].add(name)

    def order(n):
        of = folder_of(folder, n)
        return not of.startswith("moesh/nn"), not of.startswith("moesh/models"), n

    def tests_of(header):
        return folder_of(folder, header.replace("moesh/", "tests/"))

    return {header: sorted(names, key=order)[:12] + sorted(
        n for n in names if folder_of(folder, n) == tests_of(header))
            for header, names in found.items()}


class Alone:
    """Compiles one mistake by itself, and links the program with it."""

    def __init__(self, tree, program):
        self.tree, self.folder, self.program = tree, tree.folder, program
        self.commands = commands_of(self.folder)
        self.users = users(self.folder)
        _, output = run(["ninja", "-t", "commands", program], self.folder.build)
        self.link = output.splitlines()[-1]

    def shadow(self, m):
        return self.folder.path / "alone" / str(m.number)

    def message(self, m):
        """The compiler's error, or nothing. A header is compiled by those who include it."""
        text = self.tree.texts[m.file]
        changed = text[:m.site.begin] + (
            m.site.changed if m.site.is_statement or m.site.is_constant
            else f"({m.site.changed})") + text[m.site.end:]
        write(self.shadow(m) / m.file, changed)
        is_source = m.file in self.commands
        for name in [m.file] if is_source else self.users.get(m.file, []):
            words = list(self.commands[name])
            words[1:1] = [f"-I{self.shadow(m)}", "-fno-diagnostics-show-caret"]
            if is_source:
                words[words.index("-c") + 1] = str(self.shadow(m) / m.file)
            code, output = run([*words] + (
                ["-o", str(self.shadow(m) / "changed.o")] if is_source else ["-fsyntax-only"]),
                self.folder.build)
            if code:
                found = errors_in(output)
                return found[0][1] if found else output[:200]
        return ""

    def judge(self, m, tests, most):
        """The object goes before the archives, of which the linker takes what is still missing."""
        own = f"alone_{m.number}"
        code, output = run(["sh", "-c", self.link.replace(
            f"-o bin/{self.program} ", f"-o bin/{own} {self.shadow(m)}/changed.o ", 1)],
            self.folder.build)
        binary = self.folder.build / "bin" / own
        if code or not binary.exists():
            raise Fault(f"{m.describe()} does not link: {output[-1000:]}")
        server = Server(self.folder, own, own)
        m.by = ""
        try_tests(server, m, 0, tests, most)
        server.close()
        binary.unlink()


def judge_alone(tree, program, checks, chosen, jobs, most):
    """What was refused as one of several choices, `c ? changed : original`, need not be refused by
    itself; and a compiler that evaluates a list before the program runs (GCC 13 does in
    `for (a : {x, y})`) leaves nothing to choose there. Each is compiled alone, and if that works,
    linked and judged by the tests that reach its function, or where none is known, its file."""
    folder = tree.folder
    if not chosen:
        return
    print(f"  {len(chosen)} that cannot be chosen at run time, each alone", flush=True)
    alone = Alone(tree, program)
    by_time = sorted(checks, key=Check.effort)
    names = {c.name for c in checks}
    sources = digest(folder.sources(), program, str(most))

    def near(m):
        """Those that reach its function, then its file: a function may throw at its first line."""
        of_file = tree.by_file[m.file]
        of_function = {o.number for o in of_file if o.site.function == m.site.function}
        first = [c for c in by_time if of_function & c.reaches]
        return first + [c for c in by_time if c not in first and
                        {o.number for o in of_file} & c.reaches]

    def work(m):
        memory = tree.memory(m, "alone")
        kept = folder.known.get(memory)
        if kept and kept[0] == "killed" and kept[2] not in names:
            kept = None
        kept = kept or folder.known.get(tree.memory(m, "alone", sources))
        if not kept:
            message = alone.message(m)
            if message:
                kept = ["refused", "", message, ""]
            elif m.file not in alone.commands:
                kept = ["survived", "", "", ""]  # a header: nothing that uses it refuses it
            else:
                alone.judge(m, near(m), most)
                kept = [m.state, m.how, m.by, m.said]
            if kept[0] == "survived":
                memory = tree.memory(m, "alone", sources)
                folder.remember(tree.memory(m, "survived"), True)
            folder.remember(memory, kept)
            shutil.rmtree(alone.shadow(m), ignore_errors=True)
        m.state, m.how, m.by, m.said = kept
        m.alone = m.state != "refused"

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(work, chosen):
            pass
    folder.save()


def wanted(mistakes, arguments):
    """In the order of the globs."""
    globs = arguments.files or ["*"]
    found = [m for g in globs for m in mistakes if fnmatch.fnmatch(m.file, g) and (
        not arguments.only or m.site.kind in arguments.only or str(m.number) in arguments.only)]
    return list({m.number: m for m in found}.values())[::arguments.every]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--files", nargs="*",
                        help="only mistakes in these, as moesh/nn/*, in this order")
    parser.add_argument("--only", nargs="*", help="only these kinds or numbers")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="only every Nth of them: a sample")
    parser.add_argument("--quick", action="store_true", help="without mutate_sweep, "
                        "and without those that have to be compiled one by one")
    parser.add_argument("--programs", nargs="*", metavar="NAME",
                        help=f"tests of these programs only: {', '.join(PROGRAMS)}")
    parser.add_argument("--tests", default="*", metavar="FILTER",
                        help="only these, as GoogleTest's --gtest_filter takes them")
    parser.add_argument("--page", action="store_true",
                        help="put what is known into bench/results/mutants.md, and end")
    parser.add_argument("--list", action="store_true", help="print the sites, and end")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--most", type=float, default=20, metavar="SECONDS",
                        help="of each program's tests for one mistake, the quickest that reach it")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build-mutate")
    arguments = parser.parse_args()
    mistakes = all_mistakes(ROOT)
    reasons = match_reasons(mistakes, read_reasons(HERE / "equivalent.txt"))
    chosen = wanted(mistakes, arguments)
    if arguments.list:
        for m in chosen:
            print(m.describe())
        return 0
    folder = Folder(arguments.folder)
    if arguments.page:
        Tree(folder, mistakes).recall_all()
        judged = {m.file.split("/")[1] for m in mistakes if m.state}
        put_counts(ROOT / "bench" / "results" / "mutants.md", by_folder(
            [m for m in mistakes if m.file.split("/")[1] in judged], reasons))
        return 0
    if arguments.fresh:
        folder.known = {}
    began = time.time()
    tree = Tree(folder, mistakes, chosen)
    print(f"{len(chosen)} mistakes in {len(tree.mistaken)} files, of {len(mistakes)} in "
          f"{len(tree.by_file)}", flush=True)
    tree.copy_all()
    configure(tree)
    check_syntax(tree, arguments.jobs)
    programs = PROGRAMS[:1] if arguments.quick else PROGRAMS + (ON_A_GPU,) * HAS_GPU
    if arguments.programs:
        programs = [p for p in programs if p in arguments.programs]
    reached, known_files = set(), set()
    try:
        for program in programs:
            jobs, most = (min(arguments.jobs, GPU_JOBS), GPU_SECONDS) if program == ON_A_GPU else (
                arguments.jobs, arguments.most)
            build(tree, program, arguments.jobs)
            in_program = sources_of(folder, program)
            new_files = {n for n in tree.by_file
                         if n.endswith(".h") or n in in_program} - known_files
            known_files |= new_files
            print(f"  after {time.time() - began:.0f} s", flush=True)
            checks = trace(folder, program, jobs, arguments.tests)
            reached = reached.union(*(c.reaches for c in checks))
            live = [m for m in chosen if m.state != "refused" and not m.alone]
            recall(tree, live, {c.name for c in checks})
            judge(tree, program, checks, live, jobs, most)
            if arguments.quick:
                continue
            judge_alone(tree, program, checks, [
                m for m in chosen if m.state == "survived" and m.alone and m.file in in_program or
                m.file in new_files and (m.state == "refused" or m.state == "survived" and
                                         m.number not in reached and not m.file.endswith(".h"))],
                        jobs, most)
    finally:
        folder.save()
    for m in chosen:
        if m.state == "survived" and m.file in NEEDS_A_GPU and ON_A_GPU not in programs or \
                m.state == "refused" and arguments.quick:
            m.state = ""  # not run
    print(summary(chosen, reasons))
    survivors = [m for m in chosen if m.state == "survived" and m.number not in reasons]
    for m in survivors:
        print("survived:", m.describe(), "" if m.number in reached or m.alone else
              "(no test reaches it)")
    stale = {r.where: r for n, r in reasons.items() if tree.by_number[n].state == "killed"}
    for where in sorted(stale):
        if all(m.state in ("killed", "refused") for m in mistakes if stale[where].fits(m)):
            print(f"{where}: every mistake that it excuses is killed here")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fault as fault:
        sys.exit(f"mutate: {fault}")
