#!/usr/bin/env python3
"""transformers and moesh open each other's DeepSeek-V3: peer_test.py MOESH.

Nothing is changed on the way, tensor by tensor.
"""

import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, utils  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served  # noqa: E402

utils.logging.disable_progress_bar()

# moesh's own tiny model, in the words of transformers.
TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_shared_experts=1,
    n_routed_experts=8,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    v_head_dim=8,
    qk_nope_head_dim=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.0,
    max_position_embeddings=4096,
    initializer_range=0.2,
    num_mtp_layers=0,
)


def moesh(*args, fails=False):
    run = served.run([MOESH, *args])
    assert (
        run.returncode != 0
    ) == fails, f"moesh {args}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def make(folder, dtype=torch.float32, shard="5GB", **options):
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**TINY, **options})).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return opens(folder)


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def same(a, b, what):
    assert a.keys() == b.keys() and len(a) > 40, f"{what}: {sorted(a.keys() ^ b.keys())}"
    for name, x in a.items():
        y = b[name]
        assert x.dtype == y.dtype and torch.equal(
            x, y
        ), f"{what}: {name} {x.dtype} {list(x.shape)} is not {y.dtype} {list(y.shape)}"


def opens(folder, model=None):
    """transformers takes every tensor, misses none, and computes what it computed."""
    again, info = DeepseekV3ForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    bad = {k: v for k, v in info.items() if v}
    assert not bad, f"{folder}: {bad}"
    ids = torch.arange(24).reshape(2, 12) * 7 % 96
    logits = again.eval()(ids).logits
    assert torch.isfinite(logits).all()
    if model is not None:
        assert torch.equal(logits, model.eval()(ids).logits), f"{folder}: other logits"
    return again


def convert_changes_nothing(tmp):
    for number, (dtype, options) in enumerate(
        [
            (torch.float32, dict(q_lora_rank=None)),
            (torch.bfloat16, dict(q_lora_rank=12)),
            (torch.float32, dict(q_lora_rank=12, shard="100KB")),
            (
                torch.float32,
                dict(
                    q_lora_rank=12,
                    rope_parameters=dict(
                        rope_type="yarn",
                        rope_theta=5000.0,
                        factor=40.0,
                        mscale=1.0,
                        mscale_all_dim=1.0,
                        beta_fast=32.0,
                        beta_slow=1.0,
                        original_max_position_embeddings=64,
                    ),
                ),
            ),
        ]
    ):
        at = tmp / f"convert{number}"
        model = make(at / "hf", dtype, **options)
        original = tensors(at / "hf")
        moesh("convert", at / "hf", at / "same")
        same(original, tensors(at / "same"), "convert")
        assert (at / "same/generation_config.json").exists()
        opens(at / "same", model)
        moesh("inspect", at / "same", "--check")
        moesh("convert", at / "hf", at / "stacked", "--layout", "stacked")
        stacked = tensors(at / "stacked")
        same(
            {k: v for k, v in stacked.items() if "experts" in k}
            | {k: v for k, v in original.items() if ".experts." not in k},
            stacked,
            "what is not stacked",
        )
        gate_up = stacked["model.layers.1.mlp.experts.gate_up_proj"]
        assert torch.equal(
            gate_up[3, :24], original["model.layers.1.mlp.experts.3.gate_proj.weight"]
        )
        assert torch.equal(gate_up[3, 24:], original["model.layers.1.mlp.experts.3.up_proj.weight"])
        opens(at / "stacked", model)
        moesh("convert", at / "stacked", at / "back", "--layout", "per_expert")
        same(original, tensors(at / "back"), "there and back")
    moesh("convert", tmp / "convert0/hf", tmp / "bf16", "--dtype", "bfloat16")
    narrow = tensors(tmp / "bf16")
    for name, x in tensors(tmp / "convert0/hf").items():
        wanted = x if name.endswith("e_score_correction_bias") else x.bfloat16()
        assert narrow[name].dtype == wanted.dtype and torch.equal(narrow[name], wanted), name
    assert opens(tmp / "bf16").dtype == torch.bfloat16


def mesh_passes_on(folder, out, *options):
    """A step with a learning rate of 0 on eight ranks: the checkpoint has the weights that came."""
    moesh(
        "train",
        "--steps=1",
        "--mesh",
        "dp_shard=2,cp=2,tp=2,ep=2,etp=2",
        f"--checkpoint.initial_load={folder}",
        "--checkpoint.enable",
        f"--checkpoint.folder={out}",
        "--optimizer.lr=1e-300",
        "--moe.load_balance_coeff=0",
        f"--metrics.folder={out}",
        "--data.sequence_length=8",
        *options,
    )


def a_mesh_imports_and_exports_unchanged(tmp):
    for q_lora in (0, 12):
        at = tmp / f"mesh{q_lora}"
        model = make(at / "hf", q_lora_rank=q_lora or None)
        mesh_passes_on(at / "hf", at / "out", f"--model.q_lora_rank={q_lora}")
        same(tensors(at / "hf"), tensors(at / "out/step-00000001"), "import and export")
        opens(at / "out/step-00000001", model)


def trained_checkpoints_open(tmp):
    for name, options in (
        ("plain", []),
        ("narrow", ["--dtype=bfloat16", "--checkpoint.export_dtype=bfloat16"]),
    ):
        at = tmp / name
        moesh(
            "train",
            "--steps=2",
            "--mesh",
            "dp_shard=2,tp=2,ep=4",
            "--checkpoint.enable",
            f"--checkpoint.folder={at}",
            f"--metrics.folder={at}",
            "--data.sequence_length=8",
            "--checkpoint.max_shard_size=50000",
            *options,
        )
        model = opens(at / "step-00000002")
        assert model.dtype == (torch.bfloat16 if options else torch.float32)
        bias = model.model.layers[1].mlp.gate.e_score_correction_bias
        assert bias.abs().max() > 0, "the expert bias was not saved"


def tied_weights_stay_tied(tmp):
    model = make(tmp / "tied", q_lora_rank=12, tie_word_embeddings=True)
    original = tensors(tmp / "tied")
    assert "lm_head.weight" not in original
    moesh("convert", tmp / "tied", tmp / "same")
    same(original, tensors(tmp / "same"), "tied")
    opens(tmp / "same", model)
    mesh_passes_on(tmp / "tied", tmp / "mesh", "--model.tie_embeddings=true")
    same(original, tensors(tmp / "mesh/step-00000001"), "tied, through a mesh")
    opens(tmp / "mesh/step-00000001", model)


def what_does_not_fit_is_named(tmp):
    make(tmp / "wrong", q_lora_rank=12)
    file = tmp / "wrong/model.safetensors"
    original = load_file(file)

    def says(*parts, **changes):
        found = {k: v for k, v in {**original, **changes}.items() if v is not None}
        save_file(found, file, {"format": "pt"})
        text = moesh("convert", tmp / "wrong", tmp / "never", fails=bool(parts))
        for part in parts:
            assert part in text, f"no '{part}' in: {text}"

    norm = "model.norm.weight"
    says(f"1 missing: {norm}", **{norm: None})
    says("1 unexpected: model.extra.weight", **{"model.extra.weight": torch.zeros(3)})
    says(f"1 of another shape: {norm} [33] (it should be [32])", **{norm: torch.zeros(33)})
    says("F8_E4M3", "float8", norm, **{norm: original[norm].to(torch.float8_e4m3fn)})
    # The layer that predicts a second token, and a buffer of old versions, are ignored.
    says(
        **{
            "model.layers.3.eh_proj.weight": torch.zeros(3),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
        }
    )
    same(original, tensors(tmp / "never"), "without the second token")


def main():
    for case in (
        convert_changes_nothing,
        a_mesh_imports_and_exports_unchanged,
        trained_checkpoints_open,
        tied_weights_stay_tied,
        what_does_not_fit_is_named,
    ):
        with tempfile.TemporaryDirectory() as tmp:
            case(pathlib.Path(tmp))
            print(case.__name__)


if __name__ == "__main__":
    MOESH = os.path.abspath(sys.argv[1])
    torch.set_num_threads(1)
    main()
