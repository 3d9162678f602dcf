"""pip install, out of the build tree: nothing is compiled again, and what is installed works
without the tree. It requires the torch that it was built for, and no library but torch's. A build shows
its steps.

pip_test.py ROOT BUILD
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

# What a Linux with Python and torch has.
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux[-\w]*)\.so\.\d+")


def run(*command, code=0, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=280, **options)
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def installs(root, build, folder):
    """Into a folder of its own; pyproject.toml names the build tree."""
    said = run(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-v",
               "--no-build-isolation", "--no-deps", "--no-index", "--target", folder,
               "-C", f"build-dir={build}", root)
    assert "Successfully installed moesh" in said, said
    assert "Building CXX" not in said, said  # the libraries are those of the tree
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    said = run(sys.executable, "-c", "import moesh; print(moesh.__file__, moesh.__version__, "
               "moesh.estimate(mesh='tp=2')['ranks'])", env=environment, cwd="/")
    assert said == f"{folder}/moesh/__init__.py 0.1.0 2\n", said
    assert run(folder / "bin" / "moesh", "--version", env=environment).startswith("moesh 0.1.0 ")


def needs_only_torch(folder):
    """By the names in its metadata, and by the libraries of the module that does without MPI."""
    import torch
    metadata = next(folder.glob("moesh-*.dist-info/METADATA")).read_text()
    required = [r for r in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
                if "extra ==" not in r]
    assert required == [f"torch=={torch.__version__.split('+')[0]}"], required
    own = {p.name for f in (pathlib.Path(torch.__path__[0], "lib"), folder / "moesh" / "lib")
           for p in f.glob("*.so*")}
    module = next((folder / "moesh").glob("_moesh.*.so"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", module))
    others = [name for name in needed if name not in own and not SYSTEM.fullmatch(name)]
    assert needed and not others, f"{module.name} needs {others}"


def shows_steps(root):
    """The first and the last of what ninja says, and one every few seconds."""
    sys.path.insert(0, str(root / "python" / "backend"))
    import moesh_build
    shown, now = [], iter(range(1, 1000))  # each look at the clock is a second later
    lines = [b"-- Configuring done\n", *(b"[%d/20] Building %d.o\n" % (n, n) for n in range(1, 21))]
    moesh_build.show_progress(lines, shown.append, clock=lambda: next(now))
    assert shown[0] == "moesh: step 1 of 20: Building 1.o\n", shown
    assert shown[-1] == "moesh: step 20 of 20: Building 20.o\n" and 3 < len(shown) < 10, shown


def refuses_another_torch(root, build, folder):
    """A build tree of one torch is not turned over for another."""
    other = folder / "other" / "torch"
    other.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho {other}\n")
    python.chmod(0o755)
    torch = run(sys.executable, "-c", "import torch; print(torch.__path__[0])").strip()
    said = run("cmake", f"-DPython_EXECUTABLE={python}", f"-DMOESH_TORCH_DIR={torch}", "-P",
               root / "cmake" / "MoeshPip.cmake", cwd=build, code=1)
    for part in (str(other), "-C build-dir=build-pip"):
        assert part in " ".join(said.split()), said


def main(root, build):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        refuses_another_torch(pathlib.Path(root), pathlib.Path(build), folder / "r")
        shows_steps(pathlib.Path(root))
        installs(pathlib.Path(root), pathlib.Path(build), folder / "i")
        needs_only_torch(folder / "i")
    print("installed, imported and run")


if __name__ == "__main__":
    main(*sys.argv[1:])
