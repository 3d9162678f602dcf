#!/usr/bin/env python3
"""LoRA against transformers and PEFT: peft_test.py MOESH [SEED] [sampled]

For every model a random tiny checkpoint and an adapter that PEFT made, with other ranks and alphas
for some weights: logits, masked loss and the gradient of every A and B, in float32 and float64, on
one rank and on meshes; two steps of AdamW; the merged model; and what moesh trained, opened by
PEFT.
"""

import json
import os
import pathlib
import random
import sys
import tempfile
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
import golden_test  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from record_golden import record, widened  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

MESHES = ["tp=2,ep=2", "cp=2", "dp_shard=2,ep=2", "tp=2,etp=2", "tp=4,ep=2,etp=2", "pp=2",
          "dp_shard=2,tp=2,ep=4", "dp_replicate=2,cp=2,tp=2,ep=2"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# With transformers 5, PEFT takes modules of these names for experts in some models: there the
# linear layers are found by their parameters.
MLP_WEIGHTS = [name + ".weight" for name in MLP]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
WORDS = dict(vocab_size=257)
MODELS = {  # target_modules, target_parameters
    "deepseek_v3": (golden_test.deepseek(**WORDS, n_group=2, topk_group=1, q_lora_rank=12), LATENT,
                    EXPERTS + MLP_WEIGHTS),
    "qwen3_moe": (golden_test.qwen3(**WORDS, mlp_only_layers=[0], norm_topk_prob=True), ATTENTION,
                  EXPERTS + MLP_WEIGHTS),
    "mixtral": (golden_test.mixtral(**WORDS, sliding_window=3), ATTENTION, EXPERTS),
    "llama4": (golden_test.llama4(**WORDS), ATTENTION + MLP, EXPERTS),
    "gpt_oss": (golden_test.gpt_oss(**WORDS), ATTENTION, EXPERTS),
    "granitemoe": (golden_test.granite(**WORDS), ATTENTION, EXPERTS),
    "qwen3_next": (golden_test.qwen3_next(**WORDS),
                   ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"], EXPERTS + MLP_WEIGHTS),
}
PATTERNS = dict(rank_pattern={"o_proj": 3, r"layers\.1\..*experts\.down_proj": 2},
                alpha_pattern={"experts.gate_up_proj": 5})


def moesh(*args, code=0):
    done = golden_test.served.run([MOESH, *args])
    command = " ".join(map(str, args))
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def make_adapter(base, folder, modules, parameters, **options):
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(**{**dict(r=4, lora_alpha=6, target_modules=modules,
                                  target_parameters=parameters, init_lora_weights=False), **options})
    get_peft_model(model, config).save_pretrained(folder)


def opened(base, adapter, dtype=torch.float32):
    """Every tensor of the adapter has a place, and every place has a tensor."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if dtype == torch.float64:
        with widened(dtype):  # the angles of its rotations, too
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = PeftModel.from_pretrained(model.eval(), adapter, is_trainable=True)
    found = adapter_of(model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert set(found) == set(tensors), set(found) ^ set(tensors)
    for name, value in tensors.items():
        assert torch.equal(found[name].float(), value.float()), name
    return model


def adapter_of(model):
    return {name.replace(".default", ""): p.detach().clone() for name, p in model.named_parameters()
            if p.requires_grad}


def holds(base, adapter, golden, *args):
    out = moesh("verify", "--golden", golden, "--model", f"hf:{base}", "--adapter", adapter, *args)
    assert "holds" in out, out
    return out.splitlines()[-1]


def goldens_hold(tmp, number, name, seed):
    config, modules, parameters = MODELS[name]
    torch.manual_seed(seed + number)
    base, adapter = tmp / "base", tmp / "adapter"
    golden_test.make(config, base)
    make_adapter(base, adapter, modules, parameters, use_rslora=number % 2 == 1, **PATTERNS)
    for dtype in ("float32", "float64"):
        golden = tmp / f"{dtype}.safetensors"
        record(base, golden, seed=seed, adapter=adapter, dtype=dtype)
        line = holds(base, adapter, golden, "--dtype", dtype)
        print(f"{name}, one rank: {line}", flush=True)
    # Qwen3-Next carries a state along the sequence.
    meshes = [m for m in MESHES if name != "qwen3_next" or "cp" not in m]
    if SAMPLED:
        meshes = [meshes[(2 * number + i) % len(meshes)] for i in range(2)]
    for mesh in meshes:
        recompute = ("none", "selective", "full")[MESHES.index(mesh) % 3]
        line = holds(base, adapter, golden, "--dtype", "float64", "--mesh", mesh,
                     f"--activation_checkpoint.mode={recompute}")
        print(f"{name}, {mesh}, recompute {recompute}: {line}", flush=True)
    # The check can fail: another B.
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = next(t for t in tensors if t.endswith("lora_B.weight"))
    tensors[changed] = tensors[changed] * 1.01
    wrong = tmp / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    save_file(tensors, wrong / "adapter_model.safetensors")
    moesh("verify", "--golden", golden, "--model", f"hf:{base}", "--adapter", wrong, "--dtype",
          "float64", code=1)
    return base, adapter


LENGTH, BATCH, STEPS = 11, 4, 2
ADAMW = dict(lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)


def run_options(text):
    return [f"--data.path={text}", "--data.kind=text", "--data.shuffle=false",
            f"--data.sequence_length={LENGTH}", f"--training.global_batch_size={BATCH}",
            "--data.batch_size=1", f"--steps={STEPS}", "--optimizer.lr=3e-3", "--optimizer.beta1=0.8",
            "--optimizer.beta2=0.9", "--optimizer.eps=1e-6", "--optimizer.weight_decay=0.2",
            "--lr_scheduler.kind=constant", "--training.max_norm=0", "--moe.balance_loss_weight=0",
            "--checkpoint.enable", "--metrics.quiet", "--data.document_mask=false"]


def two_steps_of_torch(model, text):
    ids = torch.tensor(list(text.read_bytes()))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    for step in range(STEPS):
        rows = [ids[i * LENGTH:i * LENGTH + LENGTH + 1] for i in range(step * BATCH, (step + 1) * BATCH)]
        batch = torch.stack(rows)
        with widened(torch.float64):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return adapter_of(model)


def adamw_moves_alike(tmp, number, name, base, adapter):
    """Two steps from an adapter of PEFT, and a resumed run: the same A and B."""
    text = tmp / "text.txt"
    draw = random.Random(number)
    text.write_text("".join(draw.choice("abcdefgh .") for _ in range(LENGTH * BATCH * STEPS + 1)))
    wanted = two_steps_of_torch(opened(base, adapter, torch.float64), text)
    mesh = ("tp=2,ep=2", "dp_shard=2,ep=2", "cp=2", "pp=2", "tp=2,etp=2")[number % 5]
    common = ["train", "--model", f"hf:{base}", "--adapter", adapter, "--dtype", "float64", *run_options(text),
              f"--checkpoint.folder={tmp / 'run'}", f"--metrics.folder={tmp / 'run'}", "--mesh", mesh]
    moesh(*common, "--steps=1")
    moesh(*common)
    saved = tmp / "run" / "step-00000002"
    found = load_file(saved / "adapter_model.safetensors")
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    worst = 0.0
    before = load_file(adapter / "adapter_model.safetensors")
    for key, value in wanted.items():
        moved = (value - before[key].double()).norm()
        worst = max(worst, ((found[key] - value).norm() / moved).item())
    assert worst < 1e-7, worst
    files = sorted(f.name for f in saved.iterdir())
    assert "adapter_config.json" in files and not any(f.startswith("model") for f in files), files
    inspected = moesh("inspect", saved)
    assert f"adapter: {len(found)} tensors" in inspected, inspected
    print(f"{name}, {mesh}: two steps of AdamW, largest difference {worst:.1e} of the movement",
          flush=True)
    return saved


def moesh_adapters_open(tmp, name, base, saved, seed):
    """PEFT finds every tensor, and computes what moesh does; so does the merged model."""
    opened(base, saved)
    golden = tmp / "opened.safetensors"
    record(base, golden, seed=seed, adapter=saved, dtype="float64")
    holds(base, saved, golden, "--dtype", "float64", "--mesh", "tp=2")
    # Merged by both.
    moesh("convert", base, tmp / "merged", "--adapter", saved, "--merge")
    theirs = opened(base, saved).merge_and_unload()
    theirs.save_pretrained(tmp / "theirs")
    ours, wanted = (golden_test.all_tensors(tmp / f) for f in ("merged", "theirs"))
    assert set(ours) == set(wanted), set(ours) ^ set(wanted)
    for key, value in wanted.items():
        assert torch.allclose(ours[key], value, atol=1e-6), key
    # Only logits: the weights of a merged model have gradients of their own.
    ids = load_file(golden)
    merged = AutoModelForCausalLM.from_pretrained(tmp / "merged", attn_implementation="eager")
    logits = merged(input_ids=ids["input_ids"], use_cache=False).logits
    assert torch.allclose(logits.double(), ids["logits"], atol=2e-4), (logits - ids["logits"]).abs().max()
    prompt = ["--prompt-ids", "1,2,3", "--max-new-tokens", "6", "--dtype", "float64", "--ignore-eos"]
    texts = {moesh("generate", *args, *prompt).splitlines()[0]
             for args in ([tmp / "merged"], [base, "--adapter", saved], [base, "--adapter", saved, "--mesh", "tp=2,ep=2"])}
    assert len(texts) == 1, texts
    print(f"{name}: PEFT opens what moesh trained; merged by both, generated from", flush=True)


def new_adapters_begin_as_in_peft(tmp, name, base, text):
    """A run of its own: the names and shapes that PEFT makes of the same settings, B zero, A drawn
    from the same interval."""
    config, modules, parameters = MODELS[name]
    run = tmp / "new"
    moesh("train", "--model", f"hf:{base}", "--lora.rank=3", "--lora.alpha=4", *run_options(text),
          "--steps=1", "--optimizer.lr=1e-30", f"--checkpoint.folder={run}", f"--metrics.folder={run}",
          "--lora.rank_pattern=o_proj=2", "--lora.dropout=0.2")
    make_adapter(base, tmp / "theirs_new", modules, parameters, r=3, lora_alpha=4,
                 init_lora_weights=True, rank_pattern={"o_proj": 2})
    ours = load_file(run / "step-00000001" / "adapter_model.safetensors")
    theirs = load_file(tmp / "theirs_new" / "adapter_model.safetensors")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    opened(base, run / "step-00000001")
    for key, value in theirs.items():
        if name == "llama4" and "experts" in key and "shared" not in key:
            continue  # PEFT takes in x out for out x in there: its A is our B
        largest = value.abs().max()
        assert (ours[key].abs().max() < 1e-20) == (largest == 0), key
        assert largest == 0 or 0.8 < ours[key].abs().max() / largest < 1.25, key
    config = json.loads((run / "step-00000001" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["lora_alpha"] == 4, config
    # PEFT has no dropout where it adds to parameters.
    assert config["lora_dropout"] == 0, config
    moesh("train", "--model", f"hf:{base}", "--lora.rank=3", "--lora.targets=o_proj", "--lora.dropout=0.2",
          *run_options(text), "--steps=1", f"--checkpoint.folder={tmp / 'o'}", "--metrics.folder=")
    assert opened(base, tmp / "o" / "step-00000001").peft_config["default"].lora_dropout == 0.2


def others_are_refused(tmp, base):
    """Adapters that PEFT makes of a Qwen3-MoE, and moesh does not compute: why, and the cure."""
    for number, (part, modules, parameters, options) in enumerate([
            ("LoRA on 'model.layers.1.mlp.gate'", "all-linear", None, {}),
            ("LoRA on 'model.layers.1.mlp.gate'", ["q_proj"], ["mlp.gate.weight"], {}),
            ("LoRA on 'lm_head'", ["q_proj", "lm_head"], None, {}),
            ("LoRA on 'model.embed_tokens'", ["q_proj", "embed_tokens"], None, {}),
            ('init_lora_weights is "pissa":', ["q_proj"], None, dict(init_lora_weights="pissa")),
            ('init_lora_weights is "olora":', ["q_proj"], None, dict(init_lora_weights="olora")),
            ("use_dora is true; moesh computes plain LoRA, with false", ["q_proj"], None,
             dict(use_dora=True))]):
        adapter = tmp / f"other{number}"
        make_adapter(base, adapter, modules, parameters, **options)
        out = moesh("generate", base, "--adapter", adapter, "--prompt-ids", "1", code=2)
        assert part in out and "another model" not in out and "x0a" not in out, out
        assert "merge_and_unload" in out or "use_dora" in out, out
        print(f"refused: {part}", flush=True)


def main():
    numbers = [a for a in sys.argv[2:] if a.isdigit()]
    seed = int(numbers[0]) if numbers else random.randrange(10**6)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    for number, name in enumerate(MODELS):
        with tempfile.TemporaryDirectory() as folder:
            tmp = pathlib.Path(folder)
            base, adapter = goldens_hold(tmp, number, name, seed)
            if name == "qwen3_moe":
                others_are_refused(tmp, base)
            saved = adamw_moves_alike(tmp, number, name, base, adapter)
            moesh_adapters_open(tmp, name, base, saved, seed)
            new_adapters_begin_as_in_peft(tmp, name, base, tmp / "text.txt")


if __name__ == "__main__":
    MOESH, SAMPLED = os.path.abspath(sys.argv[1]), "sampled" in sys.argv
    main()
