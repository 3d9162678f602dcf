"""The sessions of docs/python.md and docs/debug_another_framework.md, run as they are written.

page_test.py ROOT python
page_test.py ROOT debug MOESH
"""

import doctest
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def python(root):
    """The Python session, in a folder of its own."""
    page = root / "docs" / "python.md"
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 5, blocks
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "python.md", str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(session)
    failed, tried = runner.summarize()
    assert failed == 0 and tried >= 20, f"{failed} of {tried} differ"


def rounded(line):
    """Numbers with a point, to two digits: other machines round otherwise."""
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2g}", line)


def in_a_child(example, words):
    """Exit code and output of the example as a program: torch is imported once for all of them."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1), os.dup2(write, 2)
        os.close(read), os.close(write)
        sys.argv = words
        example.main()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as output:
        said = output.read()
    return os.waitpid(child, 0)[1], said


def debug(root, moesh):
    """The commands and what they print; "..." stands for anything."""
    text = (root / "docs" / "debug_another_framework.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.M)
    assert len(commands) >= 9, commands
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(root / "examples"))
    import debug_dtensor
    for command, shown in commands:
        if command.startswith("python examples/debug_dtensor.py "):
            code, said = in_a_child(debug_dtensor, command.split()[1:])
            assert code == 0, said
        else:
            words = re.sub("^moesh ", f"{moesh} ", command)
            said = subprocess.run(words, shell=True, text=True, timeout=200, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT).stdout
        said, shown = rounded(said.strip()), rounded(shown.strip())
        pattern = ".*".join(re.escape(part) for part in shown.split("..."))
        is_shown = re.fullmatch(pattern, said, re.S)
        assert is_shown, f"$ {command}\n{said}\n\nthe page shows\n\n{shown}"


if __name__ == "__main__":
    arguments = [pathlib.Path(p).resolve() for p in (sys.argv[1], *sys.argv[3:])]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        globals()[sys.argv[2]](*arguments)
        os.chdir("/")
