#!/usr/bin/env python3
"""training.float8 against PyTorch: float8_test.py MOESH.

Projections and experts of transformers get products that are written here from the definition, with
torch.float8_e4m3fn and a loop over blocks. Loss, logits and the gradient of every parameter of whole
models must agree in float64, on one rank and on meshes.
"""

import math
import os
import pathlib
import sys
import tempfile
import types

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, utils  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import record_golden  # noqa: E402
from golden_test import deepseek, make, mixtral, qwen2, qwen3, served  # noqa: E402

utils.logging.disable_progress_bar()
TILE = 4
# Projections that stay in the type of the run: their gradients are parts of a sum on each rank.
OTHERS = ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
FLOAT32 = torch.float32  # which record_golden gives another meaning in a run of float64


def quantized(x, rows):
    """Codes, and a scale for each block of rows x TILE, as lists of blocks."""
    blocks = {}
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], TILE):
            block = x[i:i + rows, j:j + TILE].to(FLOAT32)
            mantissa, exponent = math.frexp(max(block.abs().max().item(), 1e-27) / 448)
            scale = 2.0 ** (exponent - (mantissa == 0.5))
            codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            blocks[i, j] = codes.to(torch.float64), scale
    return blocks


def product(a, w):
    """a [M, K] times w [N, K] transposed."""
    of_a, of_w = quantized(a, 1), quantized(w, TILE)
    y = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float64)
    for (m, k), (row, row_scale) in of_a.items():
        for n in range(0, w.shape[0], TILE):
            block, scale = of_w[n, k]
            y[m, n:n + TILE] += row_scale * scale * (block @ row[0])
    return y


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(context, x, w):
        context.save_for_backward(x, w)
        return product(x.flatten(0, -2), w).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(context, dy):
        x, w = context.saved_tensors
        rows = dy.flatten(0, -2)
        return product(rows, w.T).view(x.shape), rows.T @ x.flatten(0, -2)


def rounded(rows):
    """The numbers of the codes of rows."""
    flat = rows.flatten(0, -2)
    y = torch.empty(flat.shape, dtype=torch.float64)
    for (i, j), (codes, scale) in quantized(flat, 1).items():
        y[i, j:j + TILE] = codes[0] * scale
    return y.view(rows.shape)


class ToExperts(torch.autograd.Function):
    """Tokens are rounded; their gradients come back as they are."""

    @staticmethod
    def forward(context, x):
        return rounded(x)

    @staticmethod
    def backward(context, dx):
        return dx


class FromExperts(torch.autograd.Function):
    """Outputs come back as they are; their gradients are rounded."""

    @staticmethod
    def forward(context, y):
        return y.clone()

    @staticmethod
    def backward(context, dy):
        return rounded(dy)


def with_rows(forward):
    def of_rows(self, x, *args):
        return FromExperts.apply(forward(self, ToExperts.apply(x), *args))
    return of_rows


def projection(self, x):
    y = Linear.apply(x, self.weight)
    return y if self.bias is None else y + self.bias


def experts(self, x, index, weights):
    y = torch.zeros_like(x)
    for e in range(self.num_experts):
        token, k = torch.where(index == e)
        if len(token) == 0:
            continue
        gate, up = self.gate_up_proj[e].chunk(2)
        rows = x[token]
        h = self.act_fn(Linear.apply(rows, gate)) * Linear.apply(rows, up)
        h = h * weights[token, k, None]  # before it is rounded
        y = y.index_add(0, token, Linear.apply(h, self.down_proj[e]))
    return y


class InFloat8:
    """from_pretrained of a model with these products."""

    def __init__(self, has_experts, has_dense, has_rows):
        self.has_experts, self.has_dense, self.has_rows = has_experts, has_dense, has_rows

    def from_pretrained(self, *args, **options):
        model = AutoModelForCausalLM.from_pretrained(*args, **options)
        count = 0
        for name, module in model.named_modules():
            if (self.has_experts or self.has_rows) and name.endswith(".experts"):
                forward = experts if self.has_experts else type(module).forward
                module.forward = types.MethodType(with_rows(forward) if self.has_rows else forward, module)
            elif self.has_dense and "_proj" in name.rsplit(".", 1)[-1] and not name.endswith(OTHERS):
                module.forward = types.MethodType(projection, module)
            else:
                continue
            count += 1
        assert count > 1
        return model


def verify(moesh, golden, folder, *options):
    return served.run([moesh, "verify", "--golden", golden, f"--checkpoint.initial_load={folder}", "--dtype", "float64", *options])


def main(moesh):
    torch.set_num_threads(1)
    for number, config in enumerate((deepseek(n_group=1, topk_group=1, q_lora_rank=12), qwen3(), mixtral(), qwen2())):
        with tempfile.TemporaryDirectory() as at:
            folder = pathlib.Path(at) / "model"
            torch.manual_seed(number)
            make(config, folder)
            kinds = {0: ((True, False, False), (True, True, True)), 1: ((False, False, True), (True, True, False))}
            for has_experts, has_dense, has_rows in kinds.get(number, ((True, True, False),)):
                golden = pathlib.Path(at) / "golden.safetensors"
                record_golden.AutoModelForCausalLM = InFloat8(has_experts, has_dense, has_rows)
                record_golden.record(folder, golden, seed=number, length=7, dtype="float64")
                options = [f"--training.float8_tile={TILE}"] + [
                    f"--training.{key}=" + ("blockwise" if is_on else "off")
                    for key, is_on in (("float8", has_experts), ("float8_dense", has_dense),
                                       ("float8_rows", has_rows))]
                for mesh in ("tp=1", "tp=2,etp=2", "dp_shard=2,tp=2,ep=4"):
                    done = verify(moesh, golden, folder, "--mesh", mesh, *options)
                    assert done.returncode == 0 and "holds" in done.stdout, done.stdout + done.stderr
                print(f"{config.model_type}: {done.stdout.splitlines()[-1]}", flush=True)
            done = verify(moesh, golden, folder, *options[:2])
            assert done.returncode == 1 and "logits" in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
