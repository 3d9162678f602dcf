#!/usr/bin/env python3
"""Compiles the sections of a file of mistakes and wants each to fail in the right way.

A file holds sections; the #else branch, where there is one, is the cure, and belongs to the
control:

    #if defined(FAIL_missing_all_reduce)
    // expect: all_reduce<axis> first
    ...the mistake...
    #else
    ...the same without it...
    #endif

run.py --commands compile_commands.json --source FILE
    The control, with no section defined, compiles. Then all sections together: the compiler
    reports an error in each, with the text of each of its lines "// expect: text". A section where
    it does not is compiled by itself.
run.py ... --each
    Every section by itself: the compiler fails, and its first error has the texts, itself or in a
    note.
run.py ... --case NAME
    That section by itself; --case control: only the control.
... --report TEXT
    Self-test: the harness must complain, with this text.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

SECTION = re.compile(r"^#if defined\(FAIL_(\w+)\)$")
EXPECT = re.compile(r"^// expect: (\S.*)$")


@dataclasses.dataclass
class Section:
    first: int  # its lines
    last: int = 0
    texts: list = dataclasses.field(default_factory=list)


def sections(source):
    """Name -> section, in the order of the file."""
    found, current = {}, None
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if match := SECTION.match(line):
            current = found.setdefault(match[1], Section(number))
        elif line.startswith(("#else", "#endif")):
            if current is not None:
                current.last = number
            current = None
        elif (match := EXPECT.match(line)) and current is not None:
            current.texts.append(match[1])
        elif "FAIL_" in line or "expect:" in line:
            sys.exit(f"{source.name}:{number}: write '#if defined(FAIL_name)' on a line of its "
                     "own, and '// expect: text' within it")
    for name, section in found.items():
        if not section.texts:
            sys.exit(f"{source.name}: FAIL_{name} has no line '// expect: text'")
    return found


def compiler_says(commands, source, options):
    """The exit code and the messages of the compiler, called as the build calls it."""
    entries = json.loads(commands.read_text(encoding="utf-8"))
    entry = next((e for e in entries if pathlib.Path(e["file"]) == source), None)
    if entry is None:
        sys.exit(f"{source} is not in {commands}: add it with moesh_compile_fail() in "
                 "tests/compile_fail/CMakeLists.txt")
    words = shlex.split(entry["command"])
    output = words.index("-o")
    words = [w for w in words[:output] + words[output + 2 :] if w not in ("-c", str(source))]
    words += ["-fsyntax-only", *options, str(source)]
    run = subprocess.run(words, cwd=entry["directory"], env={**os.environ, "LC_ALL": "C"},
                         capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def missing_in(section, output):
    return [text for text in section.texts if text not in output.replace("moesh::", "")]


def by_section(source, found, output):
    """Name of a section -> the compiler's errors in its lines, with what led to them and notes."""
    blocks, before = [], []  # each error's lines; those that lead to the next one
    for line in output.splitlines():
        if re.search(r"(^In file included from |: In |required from|required by|in .constexpr. exp)",
                     line):
            before.append(line)
        elif re.search(r": (fatal )?error: ", line):
            blocks.append([*before, line])
            before = []
        elif before and re.match(r" *\d* \|", line):  # a line of code to what leads there
            before.append(line)
        elif blocks:
            blocks[-1] += [*before, line]
            before = []
    said = dict.fromkeys(found, "")
    place = re.compile(re.escape(str(source)) + r":(\d+)")
    for block in blocks:
        for number in (int(n) for n in place.findall("\n".join(block))):
            name = next((n for n, s in found.items() if s.first <= number < s.last), None)
            if name:
                said[name] += "\n".join(block) + "\n"
                break
    return said


def complaint_about_control(commands, source):
    code, output = compiler_says(commands, source, [])
    return f"the control does not compile:\n{output}" if code != 0 else None


def complaint_about(commands, source, case):
    """Why the section by itself is not as it should be; None when it is."""
    found = sections(source)
    if case not in found:
        return f"{source.name} has no section FAIL_{case}"
    # The compiler stops at the first error, which takes a tenth of a second, or goes on, if the
    # text is in a note to the error.
    for options in (["-Wfatal-errors"], []):
        code, output = compiler_says(commands, source, [f"-DFAIL_{case}", *options])
        if code == 0:
            return f"FAIL_{case} compiles, and it must not"
        missing = missing_in(found[case], output)
        if code == 1 and not missing:
            print(output)
            return None
    wanted = missing[0] if missing else "exit code 1"
    return f"FAIL_{case} fails, but not with '{wanted}' (exit code {code}):\n{output}"


def complaint_about_all(commands, source, each):
    """The same of the control and all sections."""
    if complaint := complaint_about_control(commands, source):
        return complaint
    found = sections(source)
    alone = list(found)
    if not each:
        _, output = compiler_says(commands, source, [f"-DFAIL_{name}" for name in found])
        said = by_section(source, found, output)
        alone = [name for name in found if not said[name] or missing_in(found[name], said[name])]
    complaints = [c for name in alone if (c := complaint_about(commands, source, name))]
    print(f"{source.name}: {len(found)} sections, {len(alone)} of them compiled by themselves: "
          f"{' '.join(alone)}")
    return "\n".join(complaints) or None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", type=pathlib.Path, required=True)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--case")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--report")
    a = parser.parse_args()
    if a.case == "control":
        complaint = complaint_about_control(a.commands, a.source)
    elif a.case:
        complaint = complaint_about(a.commands, a.source, a.case)
    else:
        complaint = complaint_about_all(a.commands, a.source, a.each)
    if a.report:
        if complaint is None or a.report not in complaint:
            sys.exit(f"the harness should complain '{a.report}', and it says: {complaint}")
        print(f"as it should, the harness complains: {complaint}")
    elif complaint:
        sys.exit(complaint)


if __name__ == "__main__":
    main()
