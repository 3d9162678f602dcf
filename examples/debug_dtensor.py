"""Someone else's model, with tensor and sequence parallelism by DTensor, and mistakes to plant:
what docs/debug_another_framework.md finds. Needs torch, and python/moesh/tensor_dump.py.

  debug_dtensor.py one.safetensors                            the model on one process
  debug_dtensor.py two.safetensors --ranks 2 [--mistake norm|mean|bias]     on two processes (gloo)
"""

import argparse
import pathlib
import sys
import tempfile

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python" / "moesh"))
from tensor_dump import dump  # noqa: E402

LAYERS, BATCH, LENGTH, DIM, HIDDEN = 3, 2, 8, 16, 32


class Block(nn.Module):
    """x + down(silu(up(norm(x)))) + bias; on a mesh each rank has its own tokens of x."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(1 + torch.randn(DIM) / 10)
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.randn(DIM) / 10)

    def forward(self, x, mesh=None, mistake=None):
        h = self.normed(x, mesh, mistake)
        if mesh is None:
            return x + F.linear(F.silu(F.linear(h, self.up)), self.down) + self.bias
        h = F.silu(F.linear(h.redistribute(mesh, [Replicate()]), self.up))  # column: HIDDEN
        y = F.linear(h, self.down)  # row: a partial sum
        if mistake == "bias":  # every rank adds it, and then they are summed
            y = DTensor.from_local(y.to_local() + self.bias.to_local(), mesh, [Partial()])
            return x + y.redistribute(mesh, [Shard(1)])
        return x + y.redistribute(mesh, [Shard(1)]) + self.bias

    def normed(self, x, mesh, mistake):
        if mesh is None:
            return F.rms_norm(x, (DIM,), self.norm)
        # Each rank has the weight and some of the tokens, so its gradient is a partial sum.
        # to_local takes it for the whole one unless it is told.
        of_gradient = None if mistake == "norm" else [Partial()]
        weight = self.norm.to_local(grad_placements=of_gradient)
        return DTensor.from_local(F.rms_norm(x.to_local(), (DIM,), weight), mesh, [Shard(1)])


def step(path, mesh=None, mistake=None):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    x = torch.randn(BATCH, LENGTH, DIM)
    if mesh is not None:
        shards = {"up": Shard(0), "down": Shard(1)}
        for block in blocks:
            for name, p in list(block.named_parameters()):
                placement = [shards.get(name, Replicate())]
                setattr(block, name, nn.Parameter(distribute_tensor(p.detach(), mesh, placement)))
        x = distribute_tensor(x, mesh, [Shard(1)])
    outputs = {}
    for i, block in enumerate(blocks):
        x = outputs[f"{i}.output"] = block(x, mesh, mistake)
    loss = x.square().mean()
    loss.backward()
    if mistake == "mean":  # as data parallelism does; DTensor has summed them over these ranks
        for block in blocks:
            block.bias.grad /= mesh.size()
    dump(blocks, path, **outputs, loss=loss)


def on_rank(rank, ranks, path, mistake, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                         world_size=ranks)
    step(path, init_device_mesh("cpu", (ranks,)), mistake)
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mistake", choices=["norm", "mean", "bias"])
    args = parser.parse_args()
    if args.ranks == 1:
        return step(args.path)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            on_rank, (args.ranks, args.path, args.mistake, folder + "/store"), nprocs=args.ranks,
            start_method="fork")  # nothing is computed before: torch is imported once


if __name__ == "__main__":
    main()
