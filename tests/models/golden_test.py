#!/usr/bin/env python3
"""Every model against transformers: golden_test.py MOESH [SEED].

Random tiny checkpoints, made afresh from a seed that is printed, in variants of each model: loss, logits and the gradient of every parameter
must agree on one rank and on meshes of every kind. And transformers computes the same from what moesh has trained.
"""

import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (AutoConfig, AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Glm4MoeLiteConfig,  # noqa: E402
                          GptOssConfig, GraniteMoeConfig, Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig,
                          MiniMaxM2Config, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig, Qwen3NextConfig, utils)

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2] / "tools")]
import served  # noqa: E402
from record_golden import record  # noqa: E402

utils.logging.disable_progress_bar()

MODELS = ("deepseek_v3", "qwen3_moe", "mixtral", "llama4", "gpt_oss", "qwen2_moe", "olmoe", "glm4_moe", "glm4_moe_lite", "minimax_m2", "granitemoe",
          "qwen3_next")
# One rank, and eight meshes: seven without cp.
MESHES = ["tp=1", "tp=2", "pp=2,tp=2,ep=2", "tp=2,ep=2", "cp=2", "tp=4,ep=2,etp=2", "pp=2", "dp_shard=2,ep=2", "dp_replicate=2,tp=2"]
COMMON = dict(vocab_size=96, hidden_size=32, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
              pad_token_id=None, bos_token_id=None, eos_token_id=None)
YARN = dict(rope_type="yarn", rope_theta=5000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=16)


def deepseek(**options):
    return DeepseekV3Config(**{**COMMON, **dict(
        num_key_value_heads=8, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, n_shared_experts=1, n_routed_experts=8,
        kv_lora_rank=16, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, num_experts_per_tok=2, first_k_dense_replace=1), **options})


def qwen3(**options):
    return Qwen3MoeConfig(**{**COMMON, **dict(intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, num_experts=8,
                                              num_experts_per_tok=2, head_dim=8), **options})


def qwen2(**options):
    return Qwen2MoeConfig(**{**COMMON, **dict(intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40,
                                              num_hidden_layers=3, num_experts=8, num_experts_per_tok=2), **options})


def qwen3_next(**options):
    return Qwen3NextConfig(**{**COMMON, **dict(
        intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_hidden_layers=3, num_experts=8,
        num_experts_per_tok=2, head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6,
        linear_value_head_dim=5, layer_types=["linear_attention", "full_attention", "linear_attention"]), **options})


def olmoe(**options):
    return OlmoeConfig(**{**COMMON, **dict(intermediate_size=24, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2), **options})


def glm4(**options):
    return Glm4MoeConfig(**{**COMMON, **dict(intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, n_routed_experts=8,
                                             n_shared_experts=1, num_experts_per_tok=2, head_dim=8, first_k_dense_replace=1), **options})


def glm4_lite(**options):
    return Glm4MoeLiteConfig(**{**COMMON, **dict(
        num_key_value_heads=8, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, n_shared_experts=1, n_routed_experts=8,
        kv_lora_rank=16, q_lora_rank=12, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, num_experts_per_tok=2), **options})


def minimax(**options):
    return MiniMaxM2Config(**{**COMMON, **dict(intermediate_size=24, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2,
                                               head_dim=8, rotary_dim=4), **options})


def granite(**options):
    return GraniteMoeConfig(**{**COMMON, **dict(intermediate_size=24, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2,
                                                embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.6,
                                                logits_scaling=2.5), **options})


def mixtral(**options):
    return MixtralConfig(**{**COMMON, **dict(intermediate_size=24, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2),
                            **options})


def llama4(**options):
    return Llama4TextConfig(**{**COMMON, **dict(intermediate_size=24, intermediate_size_mlp=48, num_hidden_layers=4, num_local_experts=8,
                                                head_dim=8, attention_chunk_size=5, floor_scale=4, interleave_moe_layer_step=2),
                               **options})


def gpt_oss(**options):
    return GptOssConfig(**{**COMMON, **dict(intermediate_size=24, num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2, head_dim=8,
                                            sliding_window=4), **options})


VARIANTS = {
    "deepseek_v3 grouped yarn": deepseek(n_group=2, topk_group=1, q_lora_rank=12,
                                         rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
    "deepseek_v3 tied full_q": deepseek(n_group=1, topk_group=1, q_lora_rank=None, tie_word_embeddings=True, norm_topk_prob=False),
    "qwen3_moe mlp_only": qwen3(mlp_only_layers=[0], norm_topk_prob=True, rope_parameters=YARN),
    "qwen3_moe tied sparse_step window": qwen3(decoder_sparse_step=2, num_hidden_layers=4, tie_word_embeddings=True,
                                               use_sliding_window=True, sliding_window=4, attention_bias=True),
    "mixtral": mixtral(),
    "mixtral window tied": mixtral(sliding_window=3, num_experts_per_tok=3, num_key_value_heads=8, tie_word_embeddings=True),
    "llama4 interleaved": llama4(),
    "llama4 lists two experts": llama4(moe_layers=[0, 2], no_rope_layers=[1, 0, 1, 0], use_qk_norm=False, num_experts_per_tok=2,
                                       attn_temperature_tuning=False, attention_chunk_size=3, rope_parameters=dict(
                                           rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                           original_max_position_embeddings=16)),
    "gpt_oss": gpt_oss(),
    "gpt_oss plain_rope tied": gpt_oss(num_hidden_layers=2, sliding_window=5, tie_word_embeddings=True, attention_bias=False,
                                       num_experts_per_tok=3, rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    "qwen2_moe mlp_only": qwen2(mlp_only_layers=[0], norm_topk_prob=True, rope_parameters=YARN),
    "qwen2_moe tied sparse_step": qwen2(decoder_sparse_step=2, num_hidden_layers=4, tie_word_embeddings=True, qkv_bias=False,
                                        head_dim=8),
    "olmoe clipped": olmoe(clip_qkv=0.8),
    "olmoe tied bias": olmoe(tie_word_embeddings=True, attention_bias=True, norm_topk_prob=True, num_key_value_heads=8,
                             rope_parameters=YARN),
    "glm4_moe norms bias": glm4(use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5),
    "glm4_moe groups tied": glm4(n_group=2, topk_group=1, n_shared_experts=2, tie_word_embeddings=True, norm_topk_prob=False,
                                 rope_parameters={**YARN, "partial_rotary_factor": 0.25, "rope_theta": 500.0}),
    "glm4_moe_lite": glm4_lite(routed_scaling_factor=1.8),
    "glm4_moe_lite two dense full_q": glm4_lite(mlp_layer_types=["dense", "dense", "sparse"], q_lora_rank=None, rope_interleave=False,
                                                tie_word_embeddings=True, norm_topk_prob=False),
    "minimax_m2": minimax(),
    "minimax_m2 tied yarn": minimax(tie_word_embeddings=True, num_experts_per_tok=3, rope_parameters={
        **YARN, "partial_rotary_factor": 0.5}),
    "granitemoe": granite(),
    "granitemoe tied bias": granite(tie_word_embeddings=True, attention_bias=True, num_experts_per_tok=3, rope_parameters=YARN),
    "qwen3_next": qwen3_next(),
    "qwen3_next tied bias": qwen3_next(
        num_hidden_layers=4, layer_types=None, full_attention_interval=4, tie_word_embeddings=True, attention_bias=True,
        norm_topk_prob=False, mlp_only_layers=[1], linear_conv_kernel_dim=3, linear_num_value_heads=4,
        rope_parameters={**YARN, "partial_rotary_factor": 0.5}),
}


def run(*args):
    done = served.run(args)
    assert done.returncode == 0, f"{' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def is_zero_centred(model_type, name):
    """A norm that multiplies with 1 + its weight."""
    return model_type == "qwen3_next" and "linear_attn" not in name


def make(config, folder):
    """Nothing is left at its initial value: a norm of ones or a bias of zeros would hide a mistake."""
    model = AutoModelForCausalLM.from_config(config)
    save_random(model, folder)


def save_random(model, folder):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.2)
            if "norm" in name and not is_zero_centred(model.config.model_type, name):
                p.add_(1)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.normal_(std=0.1)
    model.save_pretrained(folder)


# Weights of each model that bfloat16 must tell from those that are half as large again.
WRONG = (r"post_attention_layernorm\.weight$", r"\.experts\..*(down_proj|w2)|output_linear", r"\.(gate|router|router\.layer)\.weight$",
         r"(o_proj|out_proj)\.weight$")
# A head of Qwen3-Next gives the first token's value times <q, k>, normalised: a sign, which rounding may turn. The last layers and what looks
# only at some tokens are within that, and verify says so.
WRONG_OF_QWEN3_NEXT = (r"layers\.0\.post_attention_layernorm\.weight$", r"layers\.0\..*shared_expert\.down_proj", r"layers\.0\..*in_proj_qkvz",
                       r"layers\.0\..*out_proj\.weight$")


def narrow_goldens_hold(folder, golden, number):
    """In bfloat16 as well, and a weight that is half as large again is still found there. In `make test` two of them."""
    is_qwen3_next = json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_next"
    for mesh in ("tp=1", "tp=2,ep=2"):
        out = run(MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={folder}", "--mesh", mesh, "--dtype", "bfloat16")
        assert not is_qwen3_next or "of these tensors by half" in out, out
    patterns = WRONG_OF_QWEN3_NEXT if is_qwen3_next else WRONG
    wrong = folder.with_suffix(".wrong")
    shutil.copytree(folder, wrong)
    tensors, sizes = load_file(folder / "model.safetensors"), {n: t.norm() for n, t in load_file(golden).items() if n.startswith("grad.")}
    for pattern in (patterns[number % 4], patterns[(number + 1) % 4]) if SAMPLED else patterns:
        # The last has the least to change, but an expert without tokens changes nothing.
        names = [n for n in sorted(tensors) if re.search(pattern, n)]
        name = [n for n in names if sizes[f"grad.{n}"] >= max(sizes[f"grad.{m}"] for m in names) / 2][-1]
        save_file({**tensors, name: tensors[name] * 1.5}, wrong / "model.safetensors", metadata={"format": "pt"})
        done = served.run([MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={wrong}", "--dtype", "bfloat16"])
        assert done.returncode == 1 and "|delta|" in done.stdout, f"{name} * 1.5 is not found\n{done.stdout}{done.stderr}"


def sampled(meshes, number, name):
    """All meshes; in `make test` two of them, others for each variant. Layers that carry a state along the sequence take no cp."""
    if name.startswith("qwen3_next"):
        meshes = [mesh for mesh in meshes if "cp" not in mesh]
    return [meshes[(number + i) % len(meshes)] for i in range(2)] if SAMPLED else meshes


def goldens_hold(tmp, seed):
    for number, (name, config) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed + number)
        folder, golden = tmp / f"variant{number}", tmp / f"golden{number}.safetensors"
        make(config, folder)
        record(folder, golden, seed=seed + number)
        for mesh in sampled(MESHES, number, name):
            out = run(MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={folder}", "--mesh", mesh)
            assert "holds" in out, out
        if not SAMPLED or number % 2 == 0:  # of each model
            narrow_goldens_hold(folder, golden, number // 2)
        print(f"{name}: {out.splitlines()[-1]}", flush=True)


def published_llama4_holds(tmp, seed):
    """Text and images: config.json has the text model in text_config, and its tensors lie below language_model."""
    torch.manual_seed(seed + 400)
    vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vision_output_dim=32, image_size=28,
                  patch_size=14, projector_input_dim=32, projector_output_dim=32)
    folder, golden = tmp / "published", tmp / "golden.safetensors"
    save_random(Llama4ForConditionalGeneration(Llama4Config(text_config=llama4().to_dict(), vision_config=vision)), folder)
    record(folder, golden, seed=seed)
    # The folder is named once.
    out = run(MOESH, "verify", "--golden", golden, "--model", f"hf:{folder}", "--mesh", "tp=2,ep=2")
    assert "holds" in out, out
    # As a folder of the text model, which transformers opens without a word of images.
    done = served.run([MOESH, "convert", folder, tmp / "text", "--layout", "stacked"])
    assert done.returncode == 0, done.stderr
    beside = len(all_tensors(folder)) - len(all_tensors(tmp / "text"))
    assert f"has {beside} tensors beside its text model" in done.stderr and "vision_model." in done.stderr, done.stderr
    _, info = AutoModelForCausalLM.from_pretrained(tmp / "text", output_loading_info=True)
    assert not any(info.values()), info
    out = run(MOESH, "verify", "--golden", golden, "--model", f"hf:{tmp / 'text'}")
    assert "holds" in out, out
    # Llama 4, GPT-OSS and Granite have no other layout.
    make(gpt_oss(), tmp / "gpt_oss")
    make(granite(), tmp / "granite")
    for name in ("text", "gpt_oss", "granite"):
        done = served.run([MOESH, "convert", tmp / name, tmp / "other", "--layout", "per_expert"])
        assert done.returncode == 2 and "has one layout on disk" in done.stderr, done.stdout + done.stderr
        assert not (tmp / "other").exists()
    print("llama4 as it is published", flush=True)


def kimi_k2_holds(tmp, seed):
    """Kimi K2: DeepSeek-V3 under another name, with all layers in the files, also one behind the last."""
    torch.manual_seed(seed + 500)
    folder, golden = tmp / "kimi", tmp / "golden.safetensors"
    make(deepseek(n_group=1, topk_group=1, q_lora_rank=12, routed_scaling_factor=2.827, rope_parameters={**YARN, "beta_fast": 1.0}), folder)
    record(folder, golden, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    out = run(MOESH, "verify", "--golden", golden, "--model", f"hf:{folder}", "--mesh", "tp=2,ep=2")
    assert "holds" in out, out
    print("kimi_k2", flush=True)


def documents_hold(tmp, seed):
    """Sequences of several documents: transformers sees them one by one, from position 0. In `make test` one variant of each model."""
    for number, (name, config) in enumerate(VARIANTS.items()):
        if SAMPLED and number % 2 == 1:
            continue
        torch.manual_seed(seed + 200 + number)
        folder, golden = tmp / f"variant{number}", tmp / f"golden{number}.safetensors"
        make(config, folder)
        record(folder, golden, seed=seed + number, documents=4)
        for mesh in sampled(("tp=1", "cp=2", "cp=3", "dp_shard=2,tp=2,ep=2"), number, name):
            for recompute in ("none", "full") if not SAMPLED else (("none", "full")[number // 2 % 2],):
                out = run(MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={folder}", "--mesh", mesh,
                          f"--activation_checkpoint.mode={recompute}")
                assert "holds" in out, out
        print(f"{name}, by document: {out.splitlines()[-1]}", flush=True)
    # The boundaries are looked at: without them the same file does not hold.
    tensors = load_file(golden)
    del tensors["document_starts"]
    save_file(tensors, golden)
    done = served.run([MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={folder}"])
    assert done.returncode == 1 and "logits" in done.stdout, done.stdout + done.stderr


def stacked_experts_hold(tmp, seed):
    """The other layout of models whose folders have one tensor for each expert: transformers opens it, gradients have its names."""
    for number, config in enumerate((deepseek(n_group=1, topk_group=1), qwen3(), mixtral(), qwen2(), qwen3_next(), olmoe(), glm4(), glm4_lite(), minimax())):
        torch.manual_seed(seed + 100 + number)
        folder, stacked, golden = tmp / f"one{number}", tmp / f"stacked{number}", tmp / f"golden{number}.safetensors"
        make(config, folder)
        run(MOESH, "convert", folder, stacked, "--layout", "stacked")
        record(stacked, golden)
        with safe_open(golden, framework="pt") as file:
            assert any(name.endswith(".mlp.experts.gate_up_proj") for name in file.keys()), list(file.keys())
        run(MOESH, "verify", "--golden", golden, f"--checkpoint.initial_load={stacked}", "--mesh", "tp=2,ep=2")
        print(f"{config.model_type}: stacked", flush=True)


def transformers_computes_what_moesh_trained(tmp):
    for model in MODELS:
        at = tmp / model
        run(MOESH, "train", "--model", f"{model}:tiny", "--steps=10", "--mesh=tp=2,ep=2", "--data.sequence_length=8", "--checkpoint.enable",
            f"--checkpoint.folder={at}", f"--metrics.folder={at}")
        record(at / "step-00000010", at / "golden.safetensors")
        run(MOESH, "verify", "--golden", at / "golden.safetensors", f"--checkpoint.initial_load={at / 'step-00000010'}")
        print(f"{model}: ten steps, and transformers computes the same", flush=True)


def all_tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def new_models_begin_as_in_transformers(tmp):
    """Norms, biases and sinks with the values of the library, and every other tensor with its standard deviation."""
    for model in MODELS:
        at = tmp / f"new_{model}"
        has_bias = model not in ("mixtral", "minimax_m2")
        grouped = ["--model.init_bias_std=0", f"--model.attention_bias={has_bias}".lower()]
        if model in ("deepseek_v3", "glm4_moe_lite"):
            grouped = []
        run(MOESH, "train", "--model", f"{model}:tiny", "--steps=1", "--optimizer.lr=1e-15", "--data.sequence_length=8", "--checkpoint.enable",
            "--model.init_std=0.02", "--moe.load_balance_coeff=0", f"--checkpoint.folder={at}", f"--metrics.folder={at}", *grouped)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(at / "step-00000001")).save_pretrained(at / "theirs")
        ours, theirs = all_tensors(at / "step-00000001"), all_tensors(at / "theirs")
        assert set(ours) == set(theirs), set(ours) ^ set(theirs)
        num_constant = 0
        for name, wanted in theirs.items():
            found = ours[name].float()
            if (wanted == wanted.flatten()[0]).all():
                num_constant += 1
                assert torch.allclose(found, wanted.float(), atol=1e-6), f"{model}: {name} begins with {found.flatten()[:4]}, not {wanted.flatten()[0]}"
            elif name.endswith(".A_log"):  # uniform numbers, of which these are the logarithms
                least, most = found.exp().min(), found.exp().max()
                assert 0.01 <= least and most <= 16 and found.std() > 0, f"{model}: {name} begins with {found.flatten()[:4]}"
            else:
                noise = 6 / (2 * found.numel()) ** 0.5
                assert abs(found.std() / 0.02 - 1) < noise, f"{model}: {name} has a standard deviation of {found.std()}"
        print(f"{model}: begins as in transformers ({num_constant} of {len(theirs)} tensors are constant)", flush=True)


def wrong_weights_are_found(tmp):
    """The check can fail: another checkpoint of the same shape does not hold. Weights that nothing can be computed with are an error
    of the data, whose names do not control the terminal."""
    make(mixtral(), tmp / "a")
    make(mixtral(), tmp / "b")
    record(tmp / "a", tmp / "a.safetensors")
    done = served.run([MOESH, "verify", "--golden", tmp / "a.safetensors", f"--checkpoint.initial_load={tmp / 'b'}"])
    assert done.returncode == 1 and "logits" in done.stdout, done.stdout + done.stderr
    evil = tmp / "x\u009b2J\u202e\nmoesh: done\x1b[31m"
    shutil.copytree(tmp / "a", evil)
    weights = load_file(evil / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, evil / "model.safetensors", metadata={"format": "pt"})
    for dtype in "float32", "bfloat16":
        done = served.run([MOESH, "verify", "--golden", tmp / "a.safetensors", "--model", f"hf:{evil}", "--dtype", dtype])
        said = done.stdout + done.stderr
        assert done.returncode == 2 and "tensor 'model.norm.weight' has NaN or inf" in said, (dtype, done)
        assert "x\\u009b2J\\u202e\\x0amoesh: done\\x1b[31m" in said and evil.name not in said, (dtype, done)


def main():
    numbers = [a for a in sys.argv[2:] if a.isdigit()]
    seed = int(numbers[0]) if numbers else random.randrange(10**6)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    for case in (lambda t: published_llama4_holds(t, seed), lambda t: kimi_k2_holds(t, seed), lambda t: goldens_hold(t, seed),
                 lambda t: documents_hold(t, seed), lambda t: stacked_experts_hold(t, seed), transformers_computes_what_moesh_trained,
                 new_models_begin_as_in_transformers, wrong_weights_are_found):
        with tempfile.TemporaryDirectory() as tmp:
            case(pathlib.Path(tmp))


if __name__ == "__main__":  # golden_test.py MOESH [SEED] [sampled]
    MOESH, SAMPLED = os.path.abspath(sys.argv[1]), "sampled" in sys.argv
    main()
