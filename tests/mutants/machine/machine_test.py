#!/usr/bin/env python3
"""Tries the machine on a small header: sites, attribution, one killed and one that survives.

    machine_test.py copy OUTPUT            sample.h with all mistakes that compile
    machine_test.py test COMPILER PROGRAM  PROGRAM is main.cpp and sample_test.cpp with that copy
"""

import json
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
    checks = mutate.trace(tree.folder, "mutate_checks", 1, "*")
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


ALONE = {
    "moesh/nn/alone.h": """#pragma once
struct Term { int value; };
struct Whole { int value; };
inline Whole all_reduce(Term x) { return {2 * x.value}; }
inline int of_header(Term x) {
  const auto sum = all_reduce(x);
  return sum.value;
}
""", "moesh/nn/alone.cpp": """#include "moesh/nn/alone.h"
int of_source(int n) {
  const auto sum = all_reduce(Term{n});
  return sum.value + of_header({0});
}
int unseen(int n) {
  const auto sum = all_reduce(Term{n});
  return sum.value;
}
""", "main.cpp": """#include <iostream>
#include <string>
int of_source(int n);
int main() {
  for (std::string line; std::getline(std::cin, line);)
    std::cout << (of_source(3) == 6 ? "survived\\t\\t" : "failed\\tAlone.Sum\\tnot 6") << std::endl;
}
"""}
NINJA = """rule cxx
  command = {cxx} -std=c++20 -I{tree} -MD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d
rule link
  command = rm -f lib.a && ar rcs lib.a nn/alone.cpp.o && {cxx} -o $out main.cpp.o lib.a
build nn/alone.cpp.o: cxx {tree}/moesh/nn/alone.cpp
build main.cpp.o: cxx {tree}/main.cpp
build bin/alone: link main.cpp.o nn/alone.cpp.o
build alone: phony bin/alone
"""


def lone_mistakes_are_judged(root, compiler):
    """A sum left out gives another type than the sum, so both cannot be choices of one expression;
    by itself it compiles. Taken twice it is refused."""
    for name, text in ALONE.items():
        mutate.write(root / name, text)
    (root / "tests").mkdir()
    folder = mutate.Folder(root / "build-mutate", root)
    tree = mutate.Tree(folder, mutate.all_mistakes(root))
    for name, text in ALONE.items():
        mutate.write(folder.tree / name, text)
    mutate.write(folder.build / "build.ninja", NINJA.format(cxx=compiler, tree=folder.tree))
    mutate.write(folder.build / "compile_commands.json", json.dumps([{
        "file": str(folder.tree / n),
        "command": f"{compiler} -std=c++20 -I{folder.tree} -o {n.removeprefix('moesh/')}.o "
                   f"-c {folder.tree / n}"}
        for n in ALONE if n.endswith(".cpp")]))
    code, output = mutate.run(["ninja", "bin/alone"], folder.build)
    expect(code == 0, output)
    chosen = [m for m in tree.mistakes if m.site.text.startswith("all_reduce(")]
    reached = {m.number for m in tree.mistakes if m.site.function == "of_source"}
    checks = [mutate.Check("Alone.Sum", 1, reached)]
    for again in (False, True):  # the second time from memory
        for m in chosen:
            m.state = "refused"
        mutate.judge_alone(tree, "alone", checks, chosen, 1, 20)
        found = {(m.site.function, m.site.text.split(" ")[-1]): (m.state, m.by, m.alone)
                 for m in chosen}
        expect(found.get(("of_source", "out")) == ("killed", "Alone.Sum", True), again, found)
        expect(found.get(("unseen", "out")) == ("survived", "", True), again, found)
        expect(found.get(("of_header", "out")) == ("survived", "", True), again, found)
        for function in ("of_source", "of_header"):
            state, message, alone = found[(function, "twice")]
            expect(state == "refused" and "Term" in message and not alone, again, found)
        if not again:
            shutil.rmtree(folder.build)
            mutate.write(folder.build / "build.ninja", NINJA.format(cxx="false", tree="nowhere"))
            mutate.write(folder.build / "compile_commands.json", "[]")
    expect(not list((folder.path / "alone").iterdir()), "what was compiled is left behind")


def reasons_are_matched(mistakes):
    survivor = next(m for m in mistakes if m.state == "survived")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "equivalent.txt"
        entry = " | ".join(survivor.key())
        path.write_text(f"# A comment.\n{entry}\n  Both sides are\n  the total.\n")
        found = mutate.match_reasons(mistakes, mutate.read_reasons(path))
        expect(found[survivor.number].reason == "Both sides are the total.", found)
        told = mutate.by_folder(mistakes, found)
        expect("| nn | 14 | 0 | 13 | 1 | 0 | 0 |" in told and told in mutate.summary(
            mistakes, found), told)
        for text, says in ((entry.replace("<=", ">="), "equivalent.txt:1: no site is"),
                           (entry, "equivalent.txt:1: no reason"), ("a | b", "write 'file |")):
            path.write_text(text + ("\n" if says.endswith("reason") else "\n  Why.\n"))
            try:
                mutate.match_reasons(mistakes, mutate.read_reasons(path))
                raise SystemExit(f"machine_test: {text!r} is taken")
            except mutate.Fault as fault:
                expect(says in str(fault), fault)


def counts_are_put_into_the_page(mistakes):
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder) / "page.md"
        page.write_text("before\n<!-- counts: begin -->\nstale\n| nn | 9 | 0 | 9 | 0 | 0 | 0 |\n"
                        "| data | 2 | 1 | 1 | 0 | 0 | 0 |\n<!-- counts: end -->\nafter\n")
        mutate.put_counts(page, mutate.by_folder(mistakes, {}))
        text = page.read_text()
        expect(text.startswith("before\n") and text.endswith("<!-- counts: end -->\nafter\n") and
               "stale" not in text and "| data | 2 | 1 | 1 | 0 | 0 | 0 |" in text and
               "| all | 16 | 1 | 14 | 0 | 1 | 0 |" in text, text)


def test(compiler, program):
    sites_are_found()
    with tempfile.TemporaryDirectory() as folder:
        tree = sample_tree(pathlib.Path(folder))
        errors_find_their_mistake(tree, compiler)
        judged = mistakes_are_judged(tree, program)
        reasons_are_matched(judged)
        counts_are_put_into_the_page(judged)
    with tempfile.TemporaryDirectory() as folder:
        lone_mistakes_are_judged(pathlib.Path(folder).resolve(), compiler)
    every = mutate.all_mistakes(mutate.ROOT)
    mutate.match_reasons(every, mutate.read_reasons(HERE / "equivalent.txt"))
    print(f"machine_test: {len(every)} sites in the tree; every reason has its site")


if __name__ == "__main__":
    {"copy": copy, "test": test}[sys.argv[1]](*sys.argv[2:])
