"""Folders of runs for tests of the report, made up: what is in them is known."""

import json
import math
import pathlib

MESH = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "efsdp": 2, "ep": 2, "etp": 2}
CONFIG = """[model]
name = "deepseek_v3"                             # default
[training]
steps = {steps}                                  # command line
seed = 0                                         # default
[optimizer]
lr = {lr}                                        # run.toml:3
[[validation.source]]
path = "held # out.txt"                          # run.toml:9
"""


def record(step, scale=1.0, layers=4, experts=16, counts=True):
    """As metrics.jsonl has it. Its loss is scale * (1 + 4 / (1 + step / 50)), with a peak at 77."""
    loss = scale * (1 + 4 / (1 + step / 50)) + (3 if step == 77 else 0)
    r = {
        "step": step,
        "time": 1.7e9 + 0.5 * step,
        "loss": loss,
        "total_loss": loss + 0.02,
        "balance_loss": 0.015,
        "z_loss": 0.005 / step,
        "grad_norm": 0.5 + 0.2 * math.sin(step / 30),
        "lr": 1e-3 * min(1, step / 100),
        "seconds": 0.5,
        "tps": 2048.0 + 100 * math.sin(step),
        "tflops": 0.3,
        "memory_gib": 0.25,
        "expert_max_over_mean": 1.5 + 1 / step,
        "experts_idle": 0,
        "tokens": 1024,
        "tokens_total": 1024 * step,
        "trained_share": 0.25 + 0.001 * step if scale == 1 else 0.98,
        "skipped": step == 9,
        "peak_fraction": 0.31,
        "sections": {
            "data": 0.01,
            "forward": 0.15,
            "backward": 0.25,
            "reduce": 0.03,
            "update": 0.02,
            "waiting": 0.03,
            "other": 0.01,
        },
        "sent": {"tp": 4096, "dp_shard|cp": 8192},
        "expert_entropy": [2.5 - 0.1 * layer for layer in range(layers)],
        "expert_bias": [[-0.001 * step, 0.001 * step]] * layers,
    }
    if counts:
        r["expert_counts"] = [
            [
                0 if e == 3 and layer == 1 else 10 + (e * 7 + layer * 3 + step) % 11
                for e in range(experts)
            ]
            for layer in range(layers)
        ]
    if step % 50 == 0 and scale == 1:
        shares = {"zeros": [0.001 * step] * layers, "largest": [0.01] * layers}
        r["float8"] = {"experts": {"activations": shares, "gradients": shares}}
    if step % 50 == 0:
        r["validation"] = {
            "held <b>out</b>": {"loss": loss + 0.1, "perplexity": math.exp(loss + 0.1)},
            "code": {"loss": loss + 0.3, "perplexity": math.exp(loss + 0.3)},
        }
    return r


def write(folder, steps, lr=0.001, device="cpu", **options):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as lines:
        for step in range(1, steps + 1):
            lines.write(json.dumps(record(step, **options)) + "\n")
    start = {
        "time": 1.7e9,
        "first_step": 0,
        "steps": steps,
        "host": "a-host",
        "process": 1,
        "processes": 1,
        "cores": 2,
        "device": device,
        "device_name": "a processor",
        "moesh": "0.1.0",
        "torch": "2.13",
        "model": "deepseek_v3:tiny",
        "parameters": 161684,
        "active_parameters": 87956,
        "flops_per_token": 5e5,
        "ranks": 8,
        "mesh": MESH,
        "estimated_memory": 1 << 24,
        "memory_before_gib": 0.125,
        "config": CONFIG.format(steps=steps, lr=lr),
    }
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n", encoding="utf-8")
    return folder


def write_verify(path):
    meshes = [
        {"mesh": "", "holds": True, "worst": 0, "worst_tensor": "", "first": "", "error": ""},
        {
            "mesh": "tp=2 ep=2",
            "holds": True,
            "worst": 2.5e-06,
            "worst_tensor": "d(layers.0.w)",
            "first": "",
            "error": "",
        },
        {
            "mesh": "cp=2 efsdp=2",
            "holds": False,
            "worst": 1e8,
            "worst_tensor": "loss",
            "first": "loss",
            "error": "",
        },
    ]
    pathlib.Path(path).write_text(
        json.dumps({"holds": False, "seconds": 1.5, "meshes": meshes}), encoding="utf-8"
    )
