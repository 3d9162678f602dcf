"""pip's way to build moesh: scikit-build-core, with two things added.

What the compiler is at is shown on the terminal, since pip keeps the output of a build to itself.
And the wheel requires the torch that it is built for, by version.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import sys
import sysconfig
import threading
import time

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403: the hooks that are as they are there

SECONDS_BETWEEN_LINES = 5


def torch_folder():
    """The torch of this environment: also where pip isolates the build and hides its packages."""
    if spec := importlib.util.find_spec("torch"):
        return pathlib.Path(spec.submodule_search_locations[0])
    hidden = pathlib.Path(sysconfig.get_path("purelib")) / "torch"
    return hidden if (hidden / "version.py").exists() else None


def dynamic_metadata(field, settings):
    """Asked by scikit-build-core for what pyproject.toml calls dynamic."""
    assert field == "dependencies" and not settings
    folder = torch_folder()
    if folder is None:
        sys.exit(f"moesh: {sys.executable} has no torch: pip install torch, then pip install . "
                 "again")
    version = re.search(r"^__version__ *= *['\"]([^'\"+]+)",
                        (folder / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    return [f"torch=={version[1]}"]


def show_progress(lines, show, clock=time.monotonic):
    """Shows every few seconds which of ninja's steps is being taken, and the last one."""
    shown, last = float("-inf"), None
    for line in lines:
        step = re.match(rb"\[(\d+)/(\d+)\] (.*)", line)
        if not step:
            continue
        done, total, what = int(step[1]), int(step[2]), step[3].decode(errors="replace").strip()
        if clock() - shown >= SECONDS_BETWEEN_LINES or done == total:
            shown = clock()
            show(f"moesh: step {done} of {total}: {what}\n")
        last = done, total
    return last


@contextlib.contextmanager
def _on_the_terminal():
    try:
        terminal = open("/dev/tty", "w", encoding="utf-8")
    except OSError:  # nobody looks
        yield
        return

    def show(text):
        terminal.write("\r" + text)  # pip draws a spinner on this line
        terminal.flush()

    def lines():
        with os.fdopen(read, "rb") as pipe:
            for line in pipe:
                os.write(output, line)
                yield line

    read, write = os.pipe()
    output = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(target=lambda: show_progress(lines(), show))
    reader.start()
    try:
        yield
    finally:
        os.dup2(output, 1)  # nobody writes into the pipe any more
        reader.join()
        os.close(output)
        terminal.close()


def build_wheel(*arguments, **named):
    with _on_the_terminal():
        return _build.build_wheel(*arguments, **named)


def build_editable(*arguments, **named):
    with _on_the_terminal():
        return _build.build_editable(*arguments, **named)
