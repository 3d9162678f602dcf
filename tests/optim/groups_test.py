#!/usr/bin/env python3
"""What print-config says of [[optimizer.group]]: groups_test.py MOESH.

tests/train/torch_test.py compares what groups do with torch.optim.
"""

import os
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

GROUPS = [dict(match=r"\.gate\.weight", lr_scale=0.1),
          dict(match="experts", lr_scale=2, weight_decay=0),
          dict(match=r"^model\.norm\.", weight_decay=0.5)]


def settings(groups):
    return [f"--optimizer.group.{i}.{key}={value}" for i, g in enumerate(groups)
            for key, value in g.items()]


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors"))
            for name, t in load_file(path).items()}


def groups_are_printed(tmp, initial):
    out = golden_test.run(MOESH, "print-config", f"--model=hf:{initial}", *settings(GROUPS))
    lines = [line for line in out.splitlines() if line.startswith("match =")]
    sizes = [{n: t.numel() for n, t in tensors(initial).items() if re.search(g["match"], n)}
             for g in GROUPS]
    assert "512 parameters in 2 tensors" in lines[0] and sum(sizes[0].values()) == 512, lines[0]
    assert f"{sum(sizes[1].values()):,} parameters" in lines[1], lines[1]
    assert "32 parameters in 1 tensor" in lines[2], lines[2]
    (tmp / "back.toml").write_text(out)
    again = golden_test.run(MOESH, "print-config", "--config", tmp / "back.toml")
    assert [line.split(" #")[0] for line in again.splitlines()] == [
        line.split(" #")[0] for line in out.splitlines()]
    # The names that files have, of which moesh makes one parameter of all experts.
    w2 = golden_test.run(MOESH, "print-config", f"--model=hf:{initial}",
                         r"--optimizer.group.0.match=experts\.\d+\.w2\.weight$")
    wanted = sum(t.numel() for n, t in tensors(initial).items() if re.search(r"experts.*\.w2\.", n))
    assert f"{wanted:,} parameters in 2 tensors" in w2, w2
    done = golden_test.served.run([MOESH, "print-config", f"--model=hf:{initial}",
                                   r"--optimizer.group.0.match=experts\.0\."])
    assert done.returncode == 2 and "experts.1." in done.stderr and "match them all" in done.stderr
    for command in ("print-config", "train"):
        done = golden_test.served.run([MOESH, command, f"--model=hf:{initial}",
                                       "--optimizer.group.0.match=nothing"])
        assert done.returncode == 2 and "no parameter has such a name" in done.stderr, done.stderr
    print("printed, and read back", flush=True)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tmp = pathlib.Path(name)
        golden_test.make(golden_test.mixtral(), tmp / "initial")
        groups_are_printed(tmp, tmp / "initial")


if __name__ == "__main__":
    MOESH = golden_test.MOESH = os.path.abspath(sys.argv[1])
    main()
