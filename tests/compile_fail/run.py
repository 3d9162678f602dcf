#!/usr/bin/env python3
"""Compiles one section of a file of mistakes and wants it to fail in the right way.

A file holds sections; the #else branch, where there is one, is the cure, and belongs to the
control:

    #if defined(FAIL_missing_all_reduce)
    // expect: all_reduce<axis> first
    ...the mistake...
    #else
    ...the same without it...
    #endif

run.py --commands compile_commands.json --source FILE
    The control: with no section defined the file compiles.
run.py --commands compile_commands.json --source FILE --case NAME
    With FAIL_NAME defined the compiler fails, and its first error has the text of each line
    "// expect: text" of the section, itself or in a note.
... --report TEXT
    Self-test: the harness must complain, with this text.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

SECTION = re.compile(r"^#if defined\(FAIL_(\w+)\)$")
EXPECT = re.compile(r"^// expect: (\S.*)$")


def sections(source):
    """Name -> expected texts, in the order of the file."""
    found, current = {}, None
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if match := SECTION.match(line):
            current = found.setdefault(match[1], [])
        elif line.startswith(("#else", "#endif")):
            current = None
        elif (match := EXPECT.match(line)) and current is not None:
            current.append(match[1])
        elif "FAIL_" in line or "expect:" in line:
            sys.exit(f"{source.name}:{number}: write '#if defined(FAIL_name)' on a line of its "
                     "own, and '// expect: text' within it")
    for name, texts in found.items():
        if not texts:
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


def complaint_about(commands, source, case):
    """Why the case (or, without one, the control) is not as it should be; None when it is."""
    expected = sections(source)
    if case is None:
        code, output = compiler_says(commands, source, [])
        return f"the control does not compile:\n{output}" if code != 0 else None
    if case not in expected:
        return f"{source.name} has no section FAIL_{case}: configure again"
    # The compiler stops at the first error, which takes a tenth of a second, or goes on, if the
    # text is in a note to the error.
    for options in (["-Wfatal-errors"], []):
        code, output = compiler_says(commands, source, [f"-DFAIL_{case}", *options])
        if code == 0:
            return f"FAIL_{case} compiles, and it must not"
        missing = [text for text in expected[case] if text not in output.replace("moesh::", "")]
        if code == 1 and not missing:
            print(output)
            return None
    wanted = missing[0] if missing else "exit code 1"
    return f"FAIL_{case} fails, but not with '{wanted}' (exit code {code}):\n{output}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", type=pathlib.Path, required=True)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--case")
    parser.add_argument("--report")
    arguments = parser.parse_args()
    complaint = complaint_about(arguments.commands, arguments.source, arguments.case)
    if arguments.report:
        if complaint is None or arguments.report not in complaint:
            sys.exit(f"the harness should complain '{arguments.report}', and it says: {complaint}")
        print(f"as it should, the harness complains: {complaint}")
    elif complaint:
        sys.exit(complaint)


if __name__ == "__main__":
    main()
