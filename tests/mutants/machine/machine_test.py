#!/usr/bin/env python3
"""Tries the machine on a small header: sites, attribution, one killed and one that survives.

    machine_test.py copy OUTPUT            sample.h with all mistakes that compile
    machine_test.py test COMPILER PROGRAM  PROGRAM is main.cpp and sample_test.cpp with that copy
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import mutate
import sites

HERE = pathlib.Path(__file__).resolve().parent
NAME = "moesh/nn/sample.h"

SAMPLE = """
Along f(const Mesh& mesh, int rank) {
  MOESH_CHECK(rank + 1 < 5, "rank + 1 ", rank);
  constexpr auto axes = tp | cp;
  static_assert(kNum + 1 == 2);
  const auto x = all_gather<tp>(y, rows);  // tp + 1
  if constexpr (kNum > 1) return std::min(a, b);
  out.push_back(mesh.coordinate(cp) * n + rank);
  return {.dim = 0, .sizes = to_owners<ep>(x, recv, send)};
}
"""
FOUND = [  # kind, text
    ("leave out", "all_gather<tp>(y, rows) left out"),
    ("double", "all_gather<tp>(y, rows) twice"),
    ("swap axis", "all_gather<tp>(y, rows) -> all_gather<cp>(y, rows)"),
    ("bound", "std::min(a, b) -> max"),
    ("leave out", "out.push_back(mesh.coordinate(cp) * n + rank); left out"),
    ("rank order", "mesh.coordinate(cp) counted from the end"),
    ("off by one", "mesh.coordinate(cp) + 1"),
    ("swap axis", "mesh.coordinate(cp) -> mesh.coordinate(tp)"),
    ("factor", "mesh.coordinate(cp) * n + rank -> mesh.coordinate(cp) / n + rank"),
    ("sign", "mesh.coordinate(cp) * n + rank -> mesh.coordinate(cp) * n - rank"),
    ("rank order", "to_owners<ep>(x, recv, send) -> to_owners<ep>(x, send, send)"),
]
NEVER = ("rank + 1", "tp | cp", "kNum")  # checks, strings, what the compiler evaluates, comments


def expect(condition, *told):
    if not condition:
        raise SystemExit("machine_test: " + " ".join(map(str, told)))


def sites_are_found():
    found = sites.sites_of(SAMPLE)
    texts = {(s.kind, s.text) for s in found}
    for wanted in FOUND:
        expect(wanted in texts, "no site", wanted, "among", *sorted(texts))
    for s in found:
        expect(not any(n in s.text for n in NEVER), "a site where none should be:", s)
        expect(s.function == "f", "a site in", s.function)


def sample_tree(root):
    target = root / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "sample.h", target)
    tree = mutate.Tree(mutate.Folder(root / "build-mutate", root), mutate.all_mistakes(root))
    tree.render(NAME)
    return tree


def refused_in(tree):
    """The sum left out, and the sum taken twice: neither has the right type."""
    return [m for m in tree.mistakes if m.site.text.startswith("all_reduce(x) ")]


def copy(output):
    """Without what does not compile: `errors_find_their_mistake` shows which."""
    with tempfile.TemporaryDirectory() as folder:
        tree = sample_tree(pathlib.Path(folder))
        for m in refused_in(tree):
            m.state = "refused"
        tree.render(NAME)
        mutate.write(pathlib.Path(output), (tree.folder.tree / NAME).read_text(encoding="utf-8"))


def errors_find_their_mistake(tree, compiler):
    path = tree.folder.tree / NAME

    def compile_it():
        done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-I", HERE.parents[2], "-x",
                               "c++", path], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, output = compile_it()
    expect(code != 0, "the sum left out compiles")
    refused, left = tree.attribute(output)
    expect(sorted(refused) == [m.number for m in refused_in(tree)] and not left, "refused:",
           refused, left)
    tree.render(NAME)
    code, output = compile_it()
    expect(code == 0, "without it:", output)


def mistakes_are_judged(tree, program):
    binary = tree.folder.build / "bin" / "mutate_checks"
    binary.parent.mkdir(parents=True)
    binary.symlink_to(program)
    (tree.folder.root / "tests").mkdir()
    checks = mutate.trace(tree.folder, "mutate_checks", 1)
    expect(len(checks) == 3, "tests:", checks)
    live = [m for m in tree.mistakes if m.state != "refused"]
    endless = next(m for m in live if m.site.text == "i += 1 -> i += 0")
    server = mutate.Server(tree.folder, 0, "mutate_checks")
    expect(server.run(endless.number, 0.5, ["Sample.Count"])[:2] == ["endless", "Sample.Count"],
           endless.describe(), "does not end as endless")
    server.close()
    live.remove(endless)
    mutate.judge(tree, "mutate_checks", checks, live, 1, 20)
    survivors = [m.site.text for m in live if m.state == "survived"]
    expect(survivors == ["part * stride < total -> part * stride <= total"], "survived:", survivors)
    killed = next(m for m in live if "- 1 -> " in m.site.text)
    expect(killed.state == "killed" and killed.how in ("failed", "crashed") and killed.by ==
           "Sample.Start", killed)
    again = mutate.Tree(mutate.Folder(tree.folder.path, tree.folder.root),
                        mutate.all_mistakes(tree.folder.root))
    expect(all(m.state == "refused" for m in refused_in(again)), "a refusal is forgotten")
    return live


def reasons_are_matched(mistakes):
    survivor = next(m for m in mistakes if m.state == "survived")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "equivalent.txt"
        entry = " | ".join(survivor.key())
        path.write_text(f"# A comment.\n{entry}\n  Both sides are\n  the total.\n")
        found = mutate.match_reasons(mistakes, mutate.read_reasons(path))
        expect(found[survivor.number].reason == "Both sides are the total.", found)
        expect("equivalent" in mutate.table(mistakes, found), mutate.table(mistakes, found))
        for text, says in ((entry.replace("<=", ">="), "equivalent.txt:1: no site is"),
                           (entry, "equivalent.txt:1: no reason"), ("a | b", "write 'file |")):
            path.write_text(text + ("\n" if says.endswith("reason") else "\n  Why.\n"))
            try:
                mutate.match_reasons(mistakes, mutate.read_reasons(path))
                raise SystemExit(f"machine_test: {text!r} is taken")
            except mutate.Fault as fault:
                expect(says in str(fault), fault)


def test(compiler, program):
    sites_are_found()
    with tempfile.TemporaryDirectory() as folder:
        tree = sample_tree(pathlib.Path(folder))
        errors_find_their_mistake(tree, compiler)
        reasons_are_matched(mistakes_are_judged(tree, program))
    every = mutate.all_mistakes(mutate.ROOT)
    mutate.match_reasons(every, mutate.read_reasons(HERE / "equivalent.txt"))
    print(f"machine_test: {len(every)} sites in the tree; every reason has its site")


if __name__ == "__main__":
    {"copy": copy, "test": test}[sys.argv[1]](*sys.argv[2:])
