#!/usr/bin/env python3
"""Folders as DeepSeek-V3 (float8) and GPT-OSS (MXFP4) are published: quantized_test.py MOESH.

What moesh reads is what transformers' own functions make of the same bytes, bit for bit; and a mesh
whose ranks read their parts computes what one rank does. With LoRA the weights may stay as they are
(lora.base=stored): a run has the bits of one that begins with their numbers.
"""

import json
import math
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (AutoModelForCausalLM, DeepseekV3Config, GptOssConfig,  # noqa: E402
                          utils)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import served  # noqa: E402

utils.logging.disable_progress_bar()
COMMON = dict(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, pad_token_id=None,
              bos_token_id=None, eos_token_id=None, num_experts_per_tok=2)


def deepseek():
    """Widths of one, one and a half, and two blocks of 128."""
    return DeepseekV3Config(
        **COMMON, hidden_size=256, intermediate_size=192, moe_intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4,
        kv_lora_rank=64, q_lora_rank=128, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32,
        first_k_dense_replace=1, n_group=2, topk_group=1)


def gpt_oss():
    return GptOssConfig(**COMMON, hidden_size=64, intermediate_size=32, num_local_experts=4,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=4)


def to_float8(weights, block=(128, 128)):
    """(what is published, what it stands for)"""
    published, meant = {}, {}
    for name, w in weights.items():
        if w.dim() != 2 or "_proj" not in name:
            published[name] = meant[name] = w
            continue
        rows, columns = (-(-n // size) for n, size in zip(w.shape, block))
        scales = torch.rand(rows, columns) * 0.01 + 1e-4
        grid = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        values = (w / grid[:w.shape[0], :w.shape[1]]).clamp(-448, 448).to(torch.float8_e4m3fn)
        published[name], published[name + "_scale_inv"] = values, scales
        if all(n % size == 0 for n, size in zip(w.shape, block)):
            meant[name] = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
        else:  # which that function does not take
            meant[name] = values.float() * grid[:w.shape[0], :w.shape[1]]
    return published, meant


def to_mxfp4(weights):
    published, meant = {}, {}
    for name, w in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            published[name] = meant[name] = w
            continue
        experts, inputs, outputs = w.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
        published[name + "_blocks"], published[name + "_scales"] = blocks, scales
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert meant[name].shape == w.shape
    return published, meant


def run(*args, code=0):
    done = served.run(args)
    assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def check(moesh, tmp, config, quantized, method, name=None, meshes=("tp=2,ep=2", "dp_shard=2,tp=2,ep=2,etp=2"),
          **more):
    """The folder of what is published."""
    torch.manual_seed(5)
    name = name or config.model_type
    plain, folder = tmp / f"{name}_plain", tmp / name
    AutoModelForCausalLM.from_config(config).float().save_pretrained(plain)
    published, meant = quantized(load_file(plain / "model.safetensors"))
    assert len(published) > len(meant), f"{name}: nothing was quantized"
    folder.mkdir()
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer_config.json").write_text('{"added": 1}')
    described = json.loads((plain / "config.json").read_text())
    described["quantization_config"] = {"quant_method": method, **more}
    (folder / "config.json").write_text(json.dumps(described))

    out = tmp / f"{name}_out"
    run(moesh, "convert", folder, out, "--dtype", "float32")
    got = {}
    for file in out.glob("*.safetensors"):
        got.update(load_file(file))
    assert got.keys() == meant.keys(), got.keys() ^ meant.keys()
    for key, value in meant.items():
        assert torch.equal(got[key], value.float()), f"{name}: {key}"
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert (out / "tokenizer_config.json").exists()
    for mesh in meshes:
        run(moesh, "verify", "--model", f"hf:{folder}", "--mesh", mesh, "--dtype", "float64")
    return folder


def saved(folder):
    """What names the option itself is another."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name not in ("moesh.json", "run.toml")}


def stays_as_it_is(moesh, tmp, folder, meshes, dtypes=("bfloat16", "float32")):
    """LoRA on weights that stay as they are published has the bits of LoRA on their numbers."""
    for dtype in dtypes:
        for number, mesh in enumerate(meshes if dtype == dtypes[0] else meshes[:1]):
            runs = {}
            for base in "compute", "stored":
                run_folder = tmp / f"{folder.name}_{dtype}_{number}_{base}"
                run(moesh, "train", "--model", f"hf:{folder}", "--steps=2", "--dtype", dtype, "--mesh", mesh,
                    "--lora.rank=3", "--lora.init_lora_weights=false", f"--lora.base={base}",
                    "--checkpoint.enable", f"--checkpoint.folder={run_folder}", "--metrics.folder=",
                    "--training.global_batch_size=6", "--data.batch_size=1", "--data.sequence_length=16",
                    f"--activation_checkpoint.mode={('none', 'full', 'selective')[number % 3]}")
                runs[base] = saved(run_folder / "step-00000002")
            assert {"adapter_config.json", "adapter_model.safetensors"} < runs["stored"].keys()
            assert any(name.startswith("optimizer/") for name in runs["stored"]), runs["stored"].keys()
            assert runs["compute"] == runs["stored"], f"{folder.name}, {dtype}, {mesh}"


def blockwise(w):
    """Codes and scales of a matrix as convert --float8 must write them."""
    rows, columns = (-(-n // 128) for n in w.shape)
    codes, scales = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            mantissa, exponent = math.frexp(max(w[at].abs().max().item(), 1e-27) / 448)
            scales[i, j] = 2.0 ** (exponent - (mantissa == 0.5))
            codes[at] = (w[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales


def exported(moesh, tmp, plain):
    """convert --float8 writes what the formula says, and reads it back as transformers does."""
    weights = load_file(plain / "model.safetensors")
    for size in "5GB", "100kB":  # scales may be in the next file
        torch.manual_seed(3)
        out, back = tmp / f"exported{size}", tmp / f"back{size}"
        again = tmp / f"plain{size}"
        AutoModelForCausalLM.from_pretrained(plain).save_pretrained(again, max_shard_size=size)
        run(moesh, "convert", again, out, "--float8")
        got = {}
        for file in out.glob("*.safetensors"):
            got.update(load_file(file))
        num_float8 = 0
        for name, w in weights.items():
            if w.dim() != 2 or "_proj" not in name:
                assert torch.equal(got.pop(name), w), name
                continue
            codes, scales = blockwise(w)
            num_float8 += 1
            found = got.pop(name)
            assert found.dtype == torch.float8_e4m3fn, f"{name}: {found.dtype}"
            assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(got.pop(name + "_scale_inv"), scales), name
        assert num_float8 > 10 and not got, got.keys()
        described = json.loads((out / "config.json").read_text())["quantization_config"]
        others = described.pop("modules_to_not_convert")
        assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"} == set(others), others
        assert described == {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                             "weight_block_size": [128, 128]}, described
        assert not run(moesh, "inspect", out, "--check").count("DAMAGED")
        run(moesh, "convert", out, back, "--dtype", "float32")
        got = load_file(next(back.glob("*.safetensors")))
        for name, w in weights.items():
            if name + "_scale_inv" in got or w.dim() != 2 or "_proj" not in name:
                continue
            codes, scales = blockwise(w)
            grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wanted = codes.float() * grid[:w.shape[0], :w.shape[1]]
            assert torch.equal(got[name], wanted), name
            assert (wanted - w).norm() < 0.04 * w.norm(), name
    said = run(moesh, "convert", plain, tmp / "refused", "--float8", "--layout", "stacked", code=2)
    assert "float8 takes matrices" in said, said


def refused_base(moesh, folder, name, change, text):
    """So is one of weights that stay as they are."""
    path = folder / "model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    said = run(moesh, "train", "--model", f"hf:{folder}", "--steps=1", "--metrics.folder=", "--lora.rank=2",
               "--lora.base=stored", code=2)
    assert f"tensor '{name}'" in said and text in said, said
    path.write_bytes(before)


def refused_scales(moesh, folder, name, scale):
    """A scale that is not a number is named, before anything is computed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[0] = scale
    save_file(tensors, path, {"format": "pt"})
    said = run(moesh, "train", "--model", f"hf:{folder}", "--steps=1", "--metrics.folder=", code=2)
    assert f"tensor '{name}' has NaN or inf" in said, said


def main():
    moesh = pathlib.Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        folder = check(moesh, tmp, deepseek(), to_float8, "fp8")
        exported(moesh, tmp, tmp / "deepseek_v3_plain")
        stays_as_it_is(moesh, tmp, folder, ("tp=1", "dp_shard=3,tp=2", "pp=2,dp_shard=2,ep=2", "cp=2,tp=2,etp=4"))
        expert = "model.layers.1.mlp.experts.2.up_proj.weight"
        refused_base(moesh, folder, expert, lambda t: t.view(torch.uint8)[3].fill_(127), "NaN or inf")
        refused_base(moesh, folder, expert + "_scale_inv", lambda t: t.fill_(float("nan")), "NaN or inf")
        refused_scales(moesh, folder, "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv",
                       float("inf"))
        folder = check(moesh, tmp, gpt_oss(), to_mxfp4, "mxfp4")
        stays_as_it_is(moesh, tmp, folder, ("tp=1", "dp_shard=2,tp=2,ep=2,etp=2", "pp=2,tp=2,etp=2", "dp_shard=3,cp=2"))
        for exponent in 249, 255:
            refused_base(moesh, folder, "model.layers.1.mlp.experts.down_proj_scales",
                         lambda t: t[1, 2].fill_(exponent), f"the exponent {exponent}")
        refused_scales(moesh, folder, "model.layers.1.mlp.experts.down_proj_scales", 255)
        # Blocks of another size, as config.json has it; and a size that they are not of.
        folder = check(moesh, tmp, deepseek(), lambda w: to_float8(w, (64, 32)), "fp8", "small", (),
                       weight_block_size=[64, 32])
        stays_as_it_is(moesh, tmp, folder, ("tp=2",), ("bfloat16",))
        config = json.loads((folder / "config.json").read_text())
        for size, text in ([32, 64], "one for each block of 32 x 64"), ([0, 64], "weight_block_size is [0,64]"):
            config["quantization_config"]["weight_block_size"] = size
            (folder / "config.json").write_text(json.dumps(config))
            said = run(moesh, "convert", folder, tmp / "refused", code=2)
            assert text in said, said
    print("quantized folders are read as transformers reads them")


if __name__ == "__main__":
    main()
