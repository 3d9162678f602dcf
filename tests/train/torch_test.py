#!/usr/bin/env python3
"""Steps of training against torch: torch_test.py MOESH.

transformers computes the losses of the same tokens and torch.optim.SGD moves the parameters. With
the balance loss as transformers' load_balancing_loss_func has it, over the micro-batch, whose
weight is that of the folder; and with tied embeddings where a step accumulates the gradients of several micro-batches.
"""

import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

MOESH = sys.argv[1]
LENGTH, BATCH, STEPS, LR = 8, 4, 3, 0.05
MESHES = {"tp=1": 1, "dp_shard=2,tp=2,ep=2": 2, "cp=2,ep=2": 1}  # and their dp ranks
# One layer with experts: transformers has one loss for the tokens of all layers together, moesh one
# for each layer. With one layer they are the same.
BALANCED = {"mixtral": golden_test.mixtral(num_hidden_layers=1, router_aux_loss_coef=0.5),
            "qwen3_moe": golden_test.qwen3(num_hidden_layers=2, mlp_only_layers=[0],
                                           norm_topk_prob=True, router_aux_loss_coef=0.3,
                                           num_experts_per_tok=3)}
TIED = {"mixtral": golden_test.mixtral(tie_word_embeddings=True),
        "qwen3_moe": golden_test.qwen3(tie_word_embeddings=True)}


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors"))
            for name, t in load_file(path).items()}


def torch_steps(initial, ids, wanted, with_balance):
    """What is logged of each step; the weights go to a folder."""
    model = AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float64,
                                                 attn_implementation="eager")
    model.set_experts_implementation("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    logged = []
    for step in range(STEPS):
        begin = step * BATCH * LENGTH
        both = torch.stack([ids[begin + i * LENGTH:begin + (i + 1) * LENGTH + 1]
                            for i in range(BATCH)])
        out = model(input_ids=both[:, :-1], use_cache=False, output_router_logits=with_balance)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), both[:, 1:].flatten())
        balance = model.config.router_aux_loss_coef * out.aux_loss if with_balance else 0 * loss
        (loss + balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        logged.append((loss.item(), (loss + balance).item()))
    model.save_pretrained(wanted)
    return logged


def compare(tmp, name, config, with_balance, micro_batches, *options):
    torch.manual_seed(11)
    tmp.mkdir()
    initial = tmp / "initial"
    golden_test.make(config, initial)
    ids = torch.randint(96, (STEPS * BATCH * LENGTH + 1,))
    numpy.save(tmp / "tokens.npy", ids.numpy().astype(numpy.int32))
    logged = torch_steps(initial, ids, tmp / "wanted", with_balance)
    before, wanted = tensors(initial), tensors(tmp / "wanted")
    for mesh, num_dp in MESHES.items():
        run = tmp / mesh
        golden_test.run(
            MOESH, "train", f"--model=hf:{initial}", f"--data.path={tmp / 'tokens.npy'}",
            "--data.shuffle=false", f"--data.sequence_length={LENGTH}", "--dtype=float64",
            f"--training.global_batch_size={BATCH}", "--training.max_norm=0",
            f"--data.batch_size={BATCH // num_dp // micro_batches}", f"--steps={STEPS}",
            "--optimizer.name=sgd", "--optimizer.momentum=0", f"--optimizer.lr={LR}",
            "--optimizer.weight_decay=0", "--lr_scheduler.kind=constant", "--checkpoint.enable",
            f"--checkpoint.folder={run}", f"--metrics.folder={run}", f"--mesh={mesh}", *options)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for record, (loss, total) in zip(records, logged, strict=True):
            assert abs(record["loss"] - loss) < 1e-6, (name, mesh, record, loss)
            assert abs(record.get("total_loss", record["loss"]) - total) < 1e-6, (record, total)
        found, worst = tensors(run / f"step-{STEPS:08}"), 0
        assert set(found) == set(wanted), set(found) ^ set(wanted)
        for key, value in wanted.items():
            error = ((found[key] - value).norm() / (value - before[key]).norm()).item()
            assert error < 1e-4, f"{name} on {mesh}, {key}: {error} of its movement"
            worst = max(worst, error)
        print(f"{name} on {mesh}: within {worst:.1e} of the movement", flush=True)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tmp = pathlib.Path(name)
        for model, config in BALANCED.items():
            compare(tmp / f"{model} balanced", f"{model} with its balance loss", config, True, 1,
                    "--moe.balance_over=micro_batch")
        for model, config in TIED.items():
            compare(tmp / f"{model} tied", f"{model}, tied, two micro-batches", config, False, 2,
                    "--moe.balance_loss_weight=0")


if __name__ == "__main__":
    main()
