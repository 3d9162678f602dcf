"""moesh.dump of plain, compiled, checkpointed, FSDP and DTensor models, read back by the package
`safetensors`. The file is loaded by itself, as who copies it does."""

import os
import pathlib
import sys
import tempfile
import unittest
import warnings

import torch
import torch.distributed
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "moesh"))
from tensor_dump import dump, tensors_of  # noqa: E402

RANKS = 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def step(m, x):
    m(x).square().sum().backward()


def read(path):
    from safetensors.torch import load_file
    return load_file(path)


def reference():
    """What every dump of the model holds."""
    m = model()
    step(m, torch.arange(24.0).reshape(4, 6) / 24)
    found = dict(m.named_parameters())
    found.update({f"d({name})": p.grad for name, p in m.named_parameters()})
    return {name: value.detach() for name, value in found.items()}


def expect_reference(path, what):
    found, expected = read(path), reference()
    assert found.keys() == expected.keys(), f"{what}: {list(found)}"
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), f"{what}: {name}"


class OneProcess(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = f"{folder.name}/m.safetensors"
        self.x = torch.arange(24.0).reshape(4, 6) / 24

    def test_plain_compiled_and_checkpointed(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"),
                     lambda m: nn.Sequential(*map(checkpoint_wrapper, m)), nn.DataParallel):
            m = wrap(model())
            step(m, self.x)
            self.assertEqual(dump(m, self.path), self.path)
            expect_reference(self.path, str(wrap))

    def test_gradients_come_backward_after_what_else_is_given(self):
        m = model()
        step(m, self.x)
        m[0].bias.grad = None
        found = list(tensors_of(m))
        self.assertEqual(found, ["0.weight", "0.bias", "2.weight", "d(2.weight)", "d(0.weight)"])
        dump(m, self.path, loss=torch.tensor(3.5), counts=[1, 2])
        with open(self.path, "rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little")).decode()
        names = [n for n in ("counts", "2.weight", "loss", "d(2.weight)", "d(0.weight)")]
        self.assertEqual(sorted(names, key=lambda n: header.index(f'"{n}"')), names)
        self.assertEqual(float(read(self.path)["loss"]), 3.5)

    def test_every_dtype_and_shape(self):
        tensors = {str(d).removeprefix("torch."): torch.arange(7).to(d) for d in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)}
        tensors.update(empty=torch.zeros(0, 3), scalar=torch.tensor(2.0),
                       transposed=torch.arange(6.0).reshape(2, 3).T, grown=torch.ones(1).expand(3))
        dump(tensors, self.path)
        found = read(self.path)
        self.assertEqual(found.keys(), tensors.keys())
        for name, value in tensors.items():
            self.assertEqual((found[name].dtype, found[name].shape), (value.dtype, value.shape))
            self.assertEqual(found[name].double().tolist(), value.double().tolist(), name)
        with self.assertRaisesRegex(TypeError, "z is of torch.complex64"):
            dump({"z": torch.zeros(1, dtype=torch.complex64)}, self.path)
        self.assertEqual(read(self.path).keys(), tensors.keys())  # the file before is still there


class Distributed(unittest.TestCase):  # runs first: nothing is computed before the fork
    def test_fsdp_ddp_and_dtensor_are_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(on_rank, (folder,), nprocs=RANKS,
                                                  start_method="fork")
            for name in ("fully_shard", "fsdp", "ddp", "dtensor"):
                expect_reference(f"{folder}/{name}.safetensors", name)
            shards = [read(f"{folder}/mine.rank{r}.safetensors") for r in range(RANKS)]
            whole = torch.cat([s["0.weight"] for s in shards])
            self.assertTrue(torch.equal(whole, reference()["0.weight"]))


def on_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                         world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.arange(24.0).reshape(4, 6) / 24
    mine = whole.chunk(RANKS)[rank]

    def quiet_dump(m, name, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # ranks agree
            dump(m, f"{folder}/{name}.safetensors", **options)

    m = model()
    fully_shard(m, mesh=mesh)
    (m(mine).square().sum() * RANKS).backward()  # they take the mean over ranks
    quiet_dump(m, "fully_shard")
    m = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    (m(mine).square().sum() * RANKS).backward()
    quiet_dump(m, "fsdp")
    m = nn.parallel.DistributedDataParallel(model())
    (m(mine).square().sum() * RANKS).backward()
    quiet_dump(m, "ddp")
    m = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step(m, whole)
    quiet_dump(m, "dtensor")
    quiet_dump(m, "mine", per_rank=True)
    # A gradient that is not reduced is named.
    m = model()
    step(m, mine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dump(m, f"{folder}/wrong.safetensors")
    texts = [str(w.message) for w in caught]
    if rank == 0:
        assert len(texts) == 1 and "d(2.weight), d(0.bias), d(0.weight)," in texts[0], texts
    else:
        assert not texts, texts
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    unittest.main()
