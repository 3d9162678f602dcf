"""pip install, out of the build tree: nothing is compiled again, and what is installed works
without the tree.

pip_test.py ROOT BUILD
"""

import os
import pathlib
import subprocess
import sys
import tempfile


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
        installs(pathlib.Path(root), pathlib.Path(build), folder / "i")
    print("installed, imported and run")


if __name__ == "__main__":
    main(*sys.argv[1:])
