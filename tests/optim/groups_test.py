#!/usr/bin/env python3
"""[[optimizer.group]] against torch.optim: groups_test.py MOESH.

transformers computes the gradients of the same tokens, torch.optim moves the parameters in groups,
and after three steps every tensor of the checkpoint is what it has. A run that is stopped, and goes
on on another mesh, is the same run.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

LENGTH, BATCH, STEPS = 8, 4, 3
# Names that both have. The last one is asked to decay although it is a norm.
GROUPS = [dict(match=r"\.gate\.weight", lr_scale=0.1),
          dict(match="experts", lr_scale=2, weight_decay=0),
          dict(match=r"^model\.norm\.", weight_decay=0.5)]
OPTIMIZERS = {
    "adamw": (["--optimizer.eps=1e-2", "--optimizer.beta1=0.8"],
              lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-2)),
    "sgd": (["--optimizer.momentum=0.9"], lambda groups: torch.optim.SGD(groups, momentum=0.9))}


def settings(groups):
    return [f"--optimizer.group.{i}.{key}={value}" for i, g in enumerate(groups)
            for key, value in g.items()]


def train(initial, tokens, folder, *more):
    return golden_test.run(
        MOESH, "train", f"--checkpoint.initial_load={initial}", f"--data.path={tokens}",
        "--data.shuffle=false", f"--data.sequence_length={LENGTH}", "--dtype=float64",
        f"--training.global_batch_size={BATCH}", "--data.batch_size=2", "--training.max_norm=0", "--moe.balance_loss_weight=0",
        "--lr_scheduler.kind=constant", "--optimizer.lr=0.05", "--optimizer.weight_decay=0.1",
        "--checkpoint.enable", f"--checkpoint.folder={folder}", f"--metrics.folder={folder}", *more)


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors"))
            for name, t in load_file(path).items()}


def groups_of(model, lr=0.05, decay=0.1):
    """What torch.optim takes: the first pattern counts, and vectors do not decay by default."""
    groups = []
    for name, p in model.named_parameters():
        g = next((g for g in GROUPS if re.search(g["match"], name)), {})
        default = decay if p.dim() > 1 else 0
        groups.append(dict(params=[p], lr=lr * g.get("lr_scale", 1),
                           weight_decay=g.get("weight_decay", default)))
    return groups


def torch_moves_alike(tmp):
    torch.manual_seed(7)
    config = golden_test.mixtral()
    initial = tmp / "initial"
    golden_test.make(config, initial)
    ids = torch.randint(96, (STEPS * BATCH * LENGTH + 1,))
    tokens = tmp / "tokens.npy"
    numpy.save(tokens, ids.numpy().astype(numpy.int32))
    for name, (options, make) in OPTIMIZERS.items():
        for mesh in ("tp=1", "dp_shard=2,tp=2,ep=2"):
            folder = tmp / f"{name}-{mesh}"
            train(initial, tokens, folder, f"--optimizer.name={name}", *options, f"--mesh={mesh}",
                  f"--steps={STEPS}", *settings(GROUPS))
            found = tensors(folder / f"step-{STEPS:08}")
            model = AutoModelForCausalLM.from_pretrained(
                initial, dtype=torch.float64, attn_implementation="eager")
            model.set_experts_implementation("eager")
            optimizer = make(groups_of(model))
            for step in range(STEPS):
                begin = step * BATCH * LENGTH
                rows = [ids[begin + i * LENGTH:begin + (i + 1) * LENGTH + 1] for i in range(BATCH)]
                both = torch.stack(rows)
                logits = model(input_ids=both[:, :-1], use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1),
                                                  both[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.save_pretrained(tmp / "wanted")
            before, wanted = tensors(initial), tensors(tmp / "wanted")
            assert set(found) == set(wanted)
            worst = 0
            for key, value in wanted.items():
                movement = (value - before[key]).norm()
                error = (found[key] - value).norm() / movement
                worst = max(worst, error.item())
                assert error < 1e-4, f"{name}, {mesh}, {key}: {error} of its movement"
            print(f"{name} on {mesh}: within {worst:.1e} of the movement", flush=True)
    return initial, tokens


def a_run_goes_on_with_its_groups(tmp, initial, tokens):
    whole, halves = tmp / "whole", tmp / "halves"
    train(initial, tokens, whole, "--steps=3", *settings(GROUPS))
    train(initial, tokens, halves, "--steps=1", *settings(GROUPS))
    train(initial, tokens, halves, "--steps=3", "--mesh=tp=2,ep=2", *settings(GROUPS))
    a, b = tensors(whole / "step-00000003"), tensors(halves / "step-00000003")
    for key, value in a.items():
        assert torch.allclose(value, b[key], rtol=1e-9, atol=1e-12), key
    print("resumed on another mesh", flush=True)


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
    done = subprocess.run([MOESH, "print-config", f"--model=hf:{initial}",
                           r"--optimizer.group.0.match=experts\.0\."], capture_output=True, text=True)
    assert done.returncode == 2 and "experts.1." in done.stderr and "match them all" in done.stderr
    for command in ("print-config", "train"):
        done = subprocess.run([MOESH, command, f"--model=hf:{initial}",
                               "--optimizer.group.0.match=nothing"], capture_output=True, text=True)
        assert done.returncode == 2 and "no parameter has such a name" in done.stderr, done.stderr
    print("printed, and read back", flush=True)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tmp = pathlib.Path(name)
        initial, tokens = torch_moves_alike(tmp)
        a_run_goes_on_with_its_groups(tmp, initial, tokens)
        groups_are_printed(tmp, initial)


if __name__ == "__main__":
    MOESH = golden_test.MOESH = os.path.abspath(sys.argv[1])
    main()
