#!/usr/bin/env python3
"""moesh estimate --cluster, from the command line: estimate_test.py MOESH"""

import json
import pathlib
import re
import shlex
import sys
import tempfile
import xml.dom.minidom

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served  # noqa: E402

MODEL = ["--model", "deepseek_v3:debug", "--dtype=bfloat16", "--device=cuda",
         "--data.sequence_length=128", "--training.global_batch_size=64"]


def run(moesh, *args, code=0):
    done = served.run([moesh, *args], timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{args}: exit code {done.returncode}, not {code}\n{said}"
    return said


def main():
    moesh = sys.argv[1]
    estimate = ["estimate", "--cluster", "h100x8:1", *MODEL]
    with tempfile.TemporaryDirectory() as folder:
        tmp = pathlib.Path(folder)
        # In bytes: the rank of pp that holds the most is named, and all kinds of ranks are listed.
        said = run(moesh, "estimate", *MODEL, "--mesh=pp=3,dp_shard=2,ep=2", "--json", f"{tmp}/b",
                   "--parallelism.pipeline_parallel_schedule=zero_bubble")
        found = json.loads((tmp / "b").read_text())["estimates"][0]
        kinds = found["pipeline"]
        assert f"holds the most: rank {found['rank_of_pp']} of pp" in said, said
        assert sorted(rank for kind in kinds for rank in kind["ranks"]) == [0, 1, 2], kinds
        assert found["peak"] == max(kind["peak"] for kind in kinds), kinds
        assert sum(k["parameters"] * len(k["ranks"]) for k in kinds) == found["parameters"], kinds
        assert kinds[-1]["halves"] == 3 and kinds[-1]["kept"][0] > 0, kinds[-1]
        assert "ranks of pp" in said and "for weights" in said, said

        # The experts of GPT-OSS 20 B as they are published: 4.25 bits each.
        weights, peaks = {}, {}
        for base in "compute", "stored":
            run(moesh, "estimate", "--model=gpt_oss:20b", "--dtype=bfloat16", "--device=cuda",
                "--data.sequence_length=4096", "--data.batch_size=1", "--lora.rank=16",
                "--activation_checkpoint.mode=full", f"--lora.base={base}", "--json", f"{tmp}/l")
            (found,) = json.loads((tmp / "l").read_text())["estimates"]
            weights[base], peaks[base] = found["weights"], found["peak"]
        experts = 24 * 3 * 32 * 2880 * 2880
        assert weights["compute"] - weights["stored"] == experts * (2 - 17 / 32), weights
        assert peaks["stored"] < 20 * 2**30 < peaks["compute"], peaks

        said = run(moesh, *estimate, "--mesh", "pp=2,dp_shard=2,tp=2,ep=4", "--json", f"{tmp}/a",
                   "--schedule", f"{tmp}/a.svg",
                   "--parallelism.pipeline_parallel_schedule=zero_bubble")
        for part in ("pp=2 dp_shard=2 tp=2 ep=4", "schedule zero_bubble, layers of the stages: ",
                     "axes between nodes: none", "fits into 80.00 GiB"):
            assert part in said, f"no '{part}' in\n{said}"
        (result,) = json.loads((tmp / "a").read_text())["estimates"]
        assert sum(result["layers"]) == 6 and result["micro_batches"] == 16, result
        parts = sum(result[k] for k in
                    ("compute", "tensor", "experts", "storage", "bubble", "update"))
        assert abs(parts / result["seconds"] - 1) < 1e-3, result
        kernels = sum(result[k] for k in
                      ("products_of_experts", "attention", "other_products", "passes"))
        assert abs(kernels / result["compute"] - 1) < 1e-3 and result["once_more"] == 0, result
        assert abs(result["tokens_per_second"] * result["seconds"] / (64 * 128) - 1) < 1e-3, result
        assert xml.dom.minidom.parse(f"{tmp}/a.svg").documentElement.tagName == "svg"

        picture = run(moesh, *estimate, "--mesh=dp_shard=4,ep=4", "--schedule",
                      "--parallelism.pipeline_parallel_degree=2")
        assert "rank 1   .." in picture and "F4 " in picture, picture

        # The ways of one mesh: two dispatchers between nodes, one micro-batch at a time and two.
        said = run(moesh, "estimate", "--cluster", "h100x2:4", *MODEL, "--mesh=dp_shard=8,ep=4",
                   "--overlap", "--json", f"{tmp}/o")
        ways = json.loads((tmp / "o").read_text())["estimates"]
        assert len({(w["dispatcher"], w["overlap_experts"]) for w in ways}) == 4, ways
        assert [w["seconds"] for w in ways] == sorted(w["seconds"] for w in ways), ways
        assert len(re.findall(r"^two_hops +(true|false) ", said, re.M)) == 2, said

        # The best of all choices, as rows for --mesh, and a command that can be pasted.
        said = run(moesh, *estimate, "--search", "--json", f"{tmp}/b", "--schedule",
                   "--mesh=pp=2")
        found = json.loads((tmp / "b").read_text())["estimates"]
        speeds = [e["tokens_per_second"] for e in found]
        assert all(b < a for a, b in zip(speeds, speeds[1:])) and speeds, speeds
        assert "sequences of 128 tokens, 64 (8,192 tokens) a step\n" in said, said
        rows = re.findall(r"^ +[\d,]+ .*  (\S+)$", said, re.M)
        assert len(rows) == len(found) and all("pp=2," in row for row in rows), said
        (command,) = re.findall(r"^  moesh train (.*)$", said, re.M)
        assert command.count("--mesh") == 1 and "--parallelism.pipeline_parallel_sched" in command
        pasted = run(moesh, "estimate", "--cluster", "h100x8:1", *shlex.split(command),
                     "--json", f"{tmp}/c")
        (again,) = json.loads((tmp / "c").read_text())["estimates"]
        for key in ("tokens_per_second", "peak", "recompute", "batch_size", "schedule", "mesh",
                    "dispatcher", "overlap_experts"):
            assert again[key] == found[0][key], (key, again, found[0], pasted)

        # Without sizes and without a cluster both are chosen, and said.
        said = run(moesh, "estimate", "--search=4", "--model=qwen3_moe:debug", "--mesh=tp=2")
        assert "1 node of 4 h100 (4 GPUs), which is assumed" in said, said
        assert re.search(r"sequences of [\d,]+ tokens, 1,024 \(\S+ tokens\) a step; chosen here, set "
                         "them yourself: training.dtype, training.device, data.sequence_length, "
                         "training.global_batch_size", said), said
        (command,) = re.findall(r"^  moesh train (.*)$", said, re.M)
        assert "--training.global_batch_size=1024" in command and "--mesh dp_shard=2,tp=2" in command
        run(moesh, "print-config", *shlex.split(command))

        # The model of a folder is called by its folder.
        run(moesh, "train", "--model=mixtral:tiny", "--steps=1", "--metrics.folder=",
            "--checkpoint.enable", f"--checkpoint.folder={tmp}/saved")
        folder = tmp / "saved" / "step-00000001"
        for more in ([], ["--cluster=h100x8:1", "--mesh=dp_shard=8"]):
            said = run(moesh, "estimate", f"--model=hf:{folder}", *more)
            assert said.startswith(f"mixtral of {folder}") and "tiny" not in said, said

    def fails(*args, part):
        said = run(moesh, *args, code=2)
        assert part in said, f"no '{part}' in\n{said}"

    fails(*estimate, "--search", "16", part="the cluster has 8 GPUs")
    fails("estimate", "--search", part="--search 64, or a cluster")
    fails("estimate", *MODEL, "--overlap", part="--overlap compares times on a cluster")
    fails(*estimate, "--search", "--overlap", part="--overlap compares the ways of one mesh")
    fails("estimate", "--cluster", "h100:8", part="h100x8:8 is 8 nodes of 8 GPUs")
    fails(*estimate, "--mesh=pp=2", part="the mesh has 2 ranks (pp=2), and the cluster 8 GPUs")
    fails(*estimate, "--mesh=pp=8", part="model.num_layers is 6")
    fails(*estimate, "--mesh=pp=two", part="pipeline_parallel_degree is two")
    fails(*estimate, "--parallelism.pipeline_parallel_schedule=dual", part="it takes gpipe, 1f1b")
    fails("estimate", "--cluster", "abacus", part="no GPU is called 'abacus'")
    assert "none fits into 1.00 KiB" in run(moesh, *estimate, "--search", "--memory=1KiB", code=1)
    print("estimates in time are right")


if __name__ == "__main__":
    main()
