"""moesh.train, verify, estimate, compare, load_metrics: against the command, whose name is in the
variable MOESH, and with what a user may hand over."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import moesh
import numpy
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served  # noqa: E402

MOESH = os.environ["MOESH"]
SMALL = {"data": {"sequence_length": 8}, "metrics": {"quiet": True, "folder": ""}}


def command(*args, code=0):
    run = served.run([MOESH, *args], timeout=120)
    assert run.returncode == code, f"{args}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run


class Temporary(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def error(self, kind, parts, f, *args, **options):
        with self.assertRaises(moesh.Error) as caught:
            f(*args, **options)
        self.assertEqual(caught.exception.kind, kind)
        for part in parts:
            self.assertIn(part, str(caught.exception))


class Train(Temporary):
    def test_it_is_the_run_of_the_command(self):
        args = ["--mesh=dp_shard=2,tp=2,ep=4", "--steps=4", "--optimizer.lr=1e-3"]
        command("train", *args, f"--metrics.folder={self.folder / 'a'}")
        records = []
        summary = moesh.train({"mesh": "dp_shard=2,tp=2,ep=4", "optimizer": {"lr": 1e-3}}, steps=4,
                              metrics={"folder": self.folder / "b", "quiet": True},
                              on_step=records.append)
        theirs = moesh.load_metrics(self.folder / "a")
        for key in ("step", "loss", "grad_norm", "lr", "sent", "expert_counts"):
            self.assertEqual([r[key] for r in records], [r[key] for r in theirs])
        self.assertEqual(records, moesh.load_metrics(summary))
        self.assertEqual(summary.losses, [r["loss"] for r in records])
        self.assertEqual((summary.num_steps, summary.interrupted), (4, False))

    def test_runs_at_the_same_time_do_not_disturb_each_other(self):
        def losses(seed):
            return moesh.train(SMALL, steps=4, mesh="tp=2", training={"seed": seed}).losses

        alone = [losses(seed) for seed in (1, 2)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self.assertEqual(list(pool.map(losses, (1, 2))), alone)
        self.assertNotEqual(*alone)

    def test_what_the_callback_raises_ends_the_run_and_comes_out(self):
        seen = []

        class Enough(Exception):
            pass

        def stop(record):
            seen.append(record["step"])
            if len(seen) == 3:
                raise Enough("three")

        with self.assertRaisesRegex(Enough, "three"):
            moesh.train(SMALL, steps=50, mesh="tp=2", on_step=stop)
        self.assertEqual(seen, [1, 2, 3])

    def test_a_run_within_a_run_is_refused(self):
        def again(record):
            moesh.train(SMALL, steps=1)

        with self.assertRaisesRegex(moesh.Error, "call it when that run has returned"):
            moesh.train(SMALL, steps=2, on_step=again)

    def test_there_is_one_libtorch(self):
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
        for name in ("libtorch_cpu", "libgomp", "libc10."):
            files = {line.split()[-1] for line in maps.splitlines() if name in line}
            self.assertEqual(len(files), 1, files)


class Configuration(Temporary):
    def test_dict_dotted_keys_dataclass_and_file_are_the_same(self):
        @dataclasses.dataclass
        class Optimizer:
            lr: float = 2e-3
            weight_decay: float | None = None  # not set: the default counts

        @dataclasses.dataclass
        class Run:
            optimizer: Optimizer
            training: dict
            mesh: dict

        file = self.folder / "run.toml"
        file.write_text('[optimizer]\nlr = 2e-3\n[training]\nsteps = 7\n'
                        '[parallelism]\ntensor_parallel_degree = 2\n')
        forms = [
            moesh.print_config({"optimizer": {"lr": 2e-3}, "training": {"steps": 7},
                                "mesh": "tp=2"}),
            moesh.print_config({"optimizer.lr": 2e-3, "training.steps": 7}, mesh={"tp": 2}),
            moesh.print_config(Run(Optimizer(), {"steps": numpy.int32(7)}, {"tp": 2})),
            moesh.print_config(file),
            moesh.print_config({"config": str(file)}),
            moesh.print_config(file, steps=7),
        ]
        values = [[line.split("#")[0] for line in form.splitlines()] for form in forms]
        for other in values[1:]:
            self.assertEqual(other, values[0])
        self.assertIn("lr = 0.002 ", forms[0])
        self.assertRegex(forms[0], "steps = 7 +# Python")
        self.assertRegex(forms[3], r"steps = 7 +# .*run.toml:4")

    def test_lists_are_lists_of_dicts(self):
        text = moesh.print_config({"optimizer": {"group": [{"match": "gate", "lr_scale": 0.5},
                                                           {"match": "norm"}]}})
        self.assertIn('match = "norm"', text)
        self.assertIn("lr_scale = 0.5", text)

    def test_messages_are_those_of_the_command_line(self):
        for options, args in [
                ({"training.steps": 0}, ["--training.steps=0"]),
                ({"mesh": "tp=3"}, ["--mesh=tp=3"]),
                ({"mesh": {"tp": 2, "xp": 2}}, ["--mesh=tp=2,xp=2"]),
                ({"mesh": "tp"}, ["--mesh=tp"]),
                ({"model": "gpt9"}, ["--model=gpt9"]),
                ({"data": {"path": "/nowhere", "source": [{"path": "x"}]}},
                 ["--data.path=/nowhere", "--data.source.0.path=x"]),
                ({"model": {"dim": -1}}, ["--model.dim=-1"]),
                ({"training": {"dtype": "float8"}}, ["--dtype=float8"])]:
            theirs = command("print-config", *args, code=2).stderr
            text = theirs.removeprefix("moesh: config error: ").strip()
            for old, new in [("command line", "Python"), (", --mesh", ", mesh"),
                             ("--mesh", "mesh"), ("is float8", 'is "float8"')]:
                text = text.replace(old, new)
            with self.assertRaises(moesh.Error) as caught:
                moesh.print_config(options)
            self.assertEqual((caught.exception.kind, str(caught.exception)), ("config", text))

    def test_what_no_command_line_can_say(self):
        def f(config):
            return moesh.train(config)

        self.error("config", ["unknown key training.stepz", "training.steps"], f,
                   {"training": {"stepz": 3}})
        self.error("config", ['training.steps is "3" (Python)', "an integer"], f,
                   {"training.steps": "3"})
        self.error("config", ["training.steps is <object", "of type object"], f,
                   {"training.steps": object()})
        self.error("config", [str(2**70), "64 bits"], f, {"training.steps": 2**70})
        self.error("config", ["training.steps is 2.5", "an integer"], f, {"training.steps": 2.5})
        self.error("config", ["data.source.0 is 'x'", "a dict or a dataclass"], f,
                   {"data.source": ["x"]})
        self.error("config", ["mesh is 3", "it takes a text"], f, {"mesh": 3})
        self.error("config", ["the configuration is 3", "a dict, a dataclass or the path"], f, 3)
        self.error("config", ["is 3 (Python), not a str"], f, {3: 3})
        self.error("config", ["nowhere.toml"], f, "nowhere.toml")


class Samples:
    """What `make` says for each index."""

    def __init__(self, make, size=None):
        self.make, self.seen = make, []
        if size is not None:
            self.__class__ = SizedSamples
            self.size = size

    def __getitem__(self, index):
        self.seen.append(index)
        return self.make(index)


class SizedSamples(Samples):
    def __len__(self):
        return self.size


def ids(index):
    return [(7 * index + t) % 50 for t in range(9)]


class Dataset(Temporary):
    def losses(self, dataset, **options):
        return moesh.train(SMALL, dataset=dataset, steps=3, **options).losses

    def test_every_form_of_a_sample_gives_the_same_run(self):
        reference = self.losses(Samples(ids))
        for make in (lambda i: numpy.array(ids(i), dtype=numpy.uint16),
                     lambda i: numpy.array(ids(i)).repeat(2)[::2],
                     lambda i: torch.tensor(ids(i), dtype=torch.int32),
                     lambda i: tuple(ids(i)),
                     lambda i: (torch.tensor(ids(i)), [0] * 9)):
            self.assertEqual(self.losses(Samples(make)), reference)
        documents = self.losses(Samples(lambda i: (ids(i), [0] * 4 + [1] * 5)),
                                data={"document_mask": True})
        self.assertNotEqual(documents, reference)  # the label across the border does not count

    def test_each_sample_is_asked_for_once_and_a_finite_one_begins_again(self):
        endless, finite = Samples(ids), Samples(ids, 5)
        self.losses(endless, mesh="dp_shard=2")
        self.assertEqual(sorted(endless.seen), list(range(12)))
        self.losses(finite, mesh="dp_shard=2,tp=1")
        self.assertEqual(sorted(finite.seen), sorted(i % 5 for i in range(12)))

    def test_every_mesh_learns_the_same_of_it(self):
        one, two = (self.losses(Samples(ids), mesh=mesh, dtype="float64",
                                training={"global_batch_size": 4}) for mesh in ("", "dp_shard=2"))
        for a, b in zip(one, two):
            self.assertAlmostEqual(a, b, places=10)

    def test_what_it_raises_comes_out(self):
        def make(index):
            if index == 5:
                raise LookupError("no sample 5")
            return ids(index)

        for mesh in ("", "tp=2"):
            with self.assertRaisesRegex(LookupError, "no sample 5"):
                self.losses(Samples(make), mesh=mesh)

    def test_what_is_no_dataset_is_refused(self):
        for make, kind, parts in [
                (lambda i: ids(i)[:8], "data", ["sample 0", "has 8 token ids", "+ 1 = 9"]),
                (lambda i: [96] + ids(i)[1:], "data", ["id 96 at position 0", "0 to 95"]),
                (lambda i: numpy.zeros(9), "data", ["does not hold integers"]),
                (lambda i: torch.zeros(9, 1, dtype=torch.int64), "data", ["has 2 dims"]),
                (lambda i: ["a"] * 9, "data", ["holds 'a'"]),
                (lambda i: "text that", "data", ["of type str"]),
                (lambda i: (ids(i), [0]), "data", ["the documents of sample 0", "are 1 numbers"]),
                (lambda i: (ids(i), None, [1]), "data", ["the loss mask", "has 1 numbers"]),
                (lambda i: (ids(i), None, [0, 2] + [1] * 7), "data", ["has 2 at position 1"])]:
            self.error(kind, parts, self.losses, Samples(make))
        self.error("config", ["of type generator", "__getitem__"], self.losses, (x for x in [1]))
        self.error("config", ["its len() is 0"], self.losses, [])
        self.error("config", ["leave out data.path"], moesh.train, SMALL, dataset=Samples(ids),
                   data={"path": __file__, "kind": "text"}, model={"vocab_size": 257})


class OthersTest(Temporary):
    def test_verify(self):
        result = moesh.verify(dtype="float64", mesh={"tp": 2, "ep": 2})
        self.assertTrue(result["holds"])
        self.assertEqual([m["mesh"] for m in result["meshes"]], ["tp=2 ep=2"])
        self.assertIn("holds", result["meshes"][0]["text"])
        file = self.folder / "v.json"
        command("verify", "--sweep=2", "--dtype=float64", f"--json={file}")
        theirs = json.loads(file.read_text())["meshes"]
        ours = moesh.verify(dtype="float64", sweep=2)["meshes"]
        for key in ("mesh", "holds", "first", "error"):
            self.assertEqual([m[key] for m in ours], [m[key] for m in theirs])
        self.assertGreater(len(ours), 10)
        self.error("config", ["steps is 0"], moesh.verify, num_steps=0)
        self.error("config", ["--sweep is 'all'"], moesh.verify, sweep="all")

    def test_estimate(self):
        file = self.folder / "e.json"
        command("estimate", "--mesh=tp=2,ep=2", f"--json={file}")
        theirs = json.loads(file.read_text())["estimates"]
        ours = moesh.estimate(mesh="tp=2,ep=2")
        self.assertEqual([ours], theirs)
        command("estimate", "--search=2", "--memory=1KiB", f"--json={file}", code=1)
        self.assertEqual(moesh.estimate(search=2, memory="1KiB"), [])
        command("estimate", "--search=2", f"--json={file}")
        self.assertEqual(moesh.estimate(search=2), json.loads(file.read_text())["estimates"])
        self.error("config", ["no cluster", "search=64"], moesh.estimate, search=True)
        self.error("config", ["search is 0"], moesh.estimate, search=0)
        self.assertEqual(moesh.estimate(search=False), moesh.estimate())

    def test_estimate_in_time(self):
        file = self.folder / "t.json"
        model = {"model": "deepseek_v3:debug", "dtype": "bfloat16", "device": "cuda",
                 "training.global_batch_size": 64, "data.sequence_length": 128}
        options = [f"--{key}={value}" for key, value in model.items()]
        command("estimate", "--cluster=h100x8:1", "--mesh=pp=2,dp_shard=4,ep=4", *options,
                f"--json={file}")
        theirs = json.loads(file.read_text())["estimates"]
        self.assertEqual(
            [moesh.estimate(model, cluster="h100x8:1", mesh="pp=2,dp_shard=4,ep=4")], theirs)
        self.assertGreater(theirs[0]["bubble"], 0)
        command("estimate", "--cluster=h100x2:1", "--search", *options, f"--json={file}")
        theirs = json.loads(file.read_text())["estimates"]
        self.assertEqual(moesh.estimate(model, cluster="h100x2:1", search=True), theirs)
        self.assertEqual(moesh.estimate(model, cluster="h100x2:1", search=True, most=1), theirs[:1])
        self.assertEqual(
            moesh.estimate(model, cluster="h100x2:1", search=True, memory="1KiB"), [])
        self.error("config", ["the mesh has 2 ranks", "the cluster 8 GPUs"], moesh.estimate, model,
                   cluster="h100x8:1", mesh="tp=2")
        self.error("config", ["no GPU is called 'abacus'"], moesh.estimate, cluster="abacus")
        self.error("config", ["search is 8", "search=True"], moesh.estimate, model,
                   cluster="h100x8:1", search=8)

    def test_an_estimate_calls_no_function_of_torch_in_python(self):
        """`import torch` puts such ones over those of LibTorch for the device meta: ten times as
        slow, and they count other temporaries."""
        called = set()

        def profile(frame, event, _):
            if event == "call" and "/torch/" in frame.f_code.co_filename:
                called.add(f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}")

        sys.setprofile(profile)
        try:
            for model in ("deepseek_v3", "qwen3_moe", "mixtral", "llama4", "gpt_oss", "qwen2_moe", "olmoe", "glm4_moe", "glm4_moe_lite", "minimax_m2", "granitemoe", "qwen3_next"):
                for dtype in ("float32", "bfloat16"):
                    moesh.estimate(model=f"{model}:tiny", dtype=dtype, mesh="dp_shard=2,tp=2,ep=2")
        finally:
            sys.setprofile(None)
        self.assertEqual(called, set())

    def test_compare(self):
        torch.manual_seed(0)
        a = {"x": torch.randn(3, 4), "d(x)": torch.randn(4, 3).T, "n": torch.arange(3)}
        b = {"x": a["x"].numpy().copy(), "d(x)": a["d(x)"] / 2, "m": torch.ones(1)}
        moesh.dump(a, self.folder / "a.safetensors")
        moesh.dump(b, self.folder / "b.safetensors")
        comparison = moesh.compare(a, b)
        self.assertFalse(comparison.same)
        self.assertFalse(comparison)
        states = {t.name: t.state for t in comparison.tensors}
        self.assertEqual(states, {"x": "same", "d(x)": "differs", "n": "only in a",
                                  "m": "only in b"})
        first = comparison.first_difference
        self.assertEqual((first.name, first.shape), ("d(x)", [3, 4]))
        self.assertAlmostEqual(first.factor, 2)
        self.assertIn("a is 2 times b", first.diagnosis)
        files = [str(self.folder / name) for name in ("a.safetensors", "b.safetensors")]
        text = command("compare", *files, "--all", code=1).stdout
        self.assertEqual(sorted(moesh.compare(a, b).describe(all=True).splitlines()[:-1]),
                         sorted(text.splitlines()[:-1]))
        self.assertTrue(moesh.compare(a, files[0]))
        self.assertTrue(moesh.compare(*files, tolerance=2, rename={"^n$": "m"}).tensors)
        self.assertTrue(moesh.compare({"a.w": a["x"]}, {"b.w": a["x"]}, rename={"^a": "b"}))
        with self.assertRaisesRegex(TypeError, "rename is '.a=b'; it takes a dict"):
            moesh.compare(a, a, rename="^a=b")
        with self.assertRaisesRegex(TypeError, "t is of type object"):
            moesh.compare({"t": object()}, b)

    def test_no_tensor_is_copied_on_the_way(self):
        tensor = torch.ones(1000)
        self.assertEqual(moesh.tensors_of({"x": tensor})["x"].data_ptr(), tensor.data_ptr())
        array = numpy.ones(1000)
        self.assertEqual(moesh.tensors_of({"x": array})["x"].data_ptr(),
                         array.__array_interface__["data"][0])

    def test_load_metrics(self):
        file = self.folder / "metrics.jsonl"
        file.write_text('{"step":1}\n{"step":2}\n{"st')
        self.assertEqual(moesh.load_metrics(self.folder), [{"step": 1}, {"step": 2}])
        self.assertEqual(moesh.load_metrics(str(file)), [{"step": 1}, {"step": 2}])
        file.write_text("what\n")
        self.error("data", ["metrics.jsonl:1", "not JSON"], moesh.load_metrics, self.folder)
        self.error("data", ["there is no", "metrics.folder"], moesh.load_metrics, "nowhere")

    def test_another_torch_is_refused_by_name(self):
        (self.folder / "torch").mkdir()
        (self.folder / "torch" / "__init__.py").write_text('__version__ = "2.12.9"\n')
        path = f"{self.folder}:{os.environ['PYTHONPATH']}"
        run = subprocess.run([sys.executable, "-c", "import moesh"], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": path})
        self.assertEqual(run.returncode, 1)
        for part in ("ImportError", torch.__version__, "2.12.9", str(self.folder),
                     "pip install --force-reinstall"):
            self.assertIn(part, run.stderr)

    def test_python_m_moesh_is_the_command(self):
        for args, code in ((["--version"], 0), (["train", "--training.stepz=3"], 2),
                           (["compare", "/nowhere", "/nowhere"], 2)):
            theirs = command(*args, code=code)
            ours = subprocess.run([sys.executable, "-m", "moesh", *args], capture_output=True,
                                  text=True)
            self.assertEqual((ours.returncode, ours.stdout, ours.stderr),
                             (code, theirs.stdout, theirs.stderr))


if __name__ == "__main__":
    unittest.main()
