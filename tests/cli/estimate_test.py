#!/usr/bin/env python3
"""moesh estimate --cluster, from the command line: estimate_test.py MOESH"""

import json
import pathlib
import subprocess
import sys
import tempfile
import xml.dom.minidom

MODEL = ["--model", "deepseek_v3:debug", "--dtype=bfloat16", "--device=cuda",
         "--data.sequence_length=128", "--training.global_batch_size=64"]


def run(moesh, *args, code=0):
    done = subprocess.run([moesh, *args], capture_output=True, text=True, timeout=240)
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
        assert abs(result["tokens_per_second"] * result["seconds"] / (64 * 128) - 1) < 1e-3, result
        assert xml.dom.minidom.parse(f"{tmp}/a.svg").documentElement.tagName == "svg"

        picture = run(moesh, *estimate, "--mesh=dp_shard=4,ep=4", "--schedule",
                      "--parallelism.pipeline_parallel_degree=2")
        assert "rank 1   .." in picture and "F4 " in picture, picture

        said = run(moesh, *estimate, "--search", "--json", f"{tmp}/b", "--schedule")
        assert "ways to split a layer" in said and "the fastest 20" in said, said
        speeds = [e["tokens_per_second"] for e in json.loads((tmp / "b").read_text())["estimates"]]
        assert speeds == sorted(speeds, reverse=True) and len(speeds) == 20, speeds

    def fails(*args, part):
        said = run(moesh, *args, code=2)
        assert part in said, f"no '{part}' in\n{said}"

    fails(*estimate, "--search", "16", part="the cluster has 8 GPUs")
    fails("estimate", *MODEL, "--mesh=pp=2", "--search=4", "--memory=1GiB",
          part="a search by bytes goes through meshes without pp, and pp is 2")
    fails(*estimate, "--mesh=pp=2", part="the mesh has 2 ranks (pp=2), and the cluster 8 GPUs")
    fails(*estimate, "--mesh=pp=8", part="model.num_layers is 6")
    fails(*estimate, "--mesh=pp=two", part="pipeline_parallel_degree is two")
    fails(*estimate, "--parallelism.pipeline_parallel_schedule=dual", part="it takes gpipe, 1f1b")
    fails("estimate", "--cluster", "abacus", part="no GPU is called 'abacus'")
    assert "none fits into 1.00 KiB" in run(moesh, *estimate, "--search", "--memory=1KiB", code=1)
    print("estimates in time are right")


if __name__ == "__main__":
    main()
