#!/usr/bin/env python3
"""The model of docs/own_model.md against transformers: own_model_test.py PROGRAM

A random tiny dots.llm1, and what transformers computes for it in float64, for own_model_test.cpp.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import golden_test  # noqa: E402
import torch  # noqa: E402
from transformers import Dots1Config  # noqa: E402


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = Dots1Config(
        **golden_test.COMMON, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
        n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, head_dim=6,
        sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        golden_test.make(config, folder)
        golden_test.record(folder, folder / "golden.safetensors", dtype="float64")
        done = subprocess.run([sys.argv[1], *sys.argv[2:]], env={**os.environ, "MOESH_DOTS1": tmp})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
