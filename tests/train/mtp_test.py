#!/usr/bin/env python3
"""Multi-token prediction against PyTorch: mtp_test.py MOESH [SEED] [--all].

torch_run.py computes it from the formulas of the DeepSeek-V3 report; only the blocks are those of
transformers. Losses, every gradient (by what one step of plain SGD moves), whole runs, validation
with acceptance, resuming, and the names in files.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile

import torch
import torch_run
import torch_test
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402

# Plain SGD: what moves is the gradient.
ONE_STEP = {"training.steps": 1, "training.max_norm": 0.0, "optimizer.name": "sgd",
            "optimizer.momentum": 0.0, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0,
            "lr_scheduler.warmup_steps": 0, "training.mtp_loss_weight": 0.7}
torch_test.SETTINGS.update({
    "one step": ({**ONE_STEP, "data.packing": "best_fit", "data.sequence_length": 17},
                 [("chats.bin", 3.0), ("more.bin", 1.0)]),
    "one step without masks": ({**ONE_STEP, "data.document_mask": "false"}, [("a.jsonl", 1.0)]),
})
WORDS = dict(vocab_size=257)
MODELS = {  # and how many layers of multi-token prediction
    "deepseek_v3": (golden_test.deepseek(**WORDS, n_group=2, topk_group=1, q_lora_rank=12), 2),
    "deepseek_v3 tied": (golden_test.deepseek(**WORDS, n_group=1, topk_group=1,
                                              tie_word_embeddings=True), 1),
    "glm4_moe": (golden_test.glm4(**WORDS, use_qk_norm=True, attention_bias=True,
                                  routed_scaling_factor=2.5), 1),
}
MESHES = ["tp=1", "dp_shard=2,tp=2,ep=2", "pp=2,cp=2,ep=2", "tp=4,ep=2,etp=2", "cp=3"]
ALL = {"one step": MESHES, "one step without masks": MESHES[:3], "mtp": MESHES[:3]}
SAMPLED = [("deepseek_v3", "one step", MESHES[:3]),
           ("deepseek_v3 tied", "one step", MESHES[2:3]),
           ("glm4_moe", "one step without masks", MESHES[1:2]),
           ("deepseek_v3", "mtp", MESHES[1:3])]


def maker(depth):
    """A folder as others publish it: the last layers are those of multi-token prediction."""

    def make(config, folder):
        longer = type(config)(**{**config.to_dict(),
                                 "num_hidden_layers": config.num_hidden_layers + depth})
        golden_test.make(longer, folder)
        path = folder / "model.safetensors"
        tensors, dim = load_file(path), config.hidden_size
        embedding = tensors["model.embed_tokens.weight"]
        for k in range(depth):
            layer = f"model.layers.{config.num_hidden_layers + k}."
            for name in ("enorm", "hnorm", "shared_head.norm"):
                tensors[f"{layer}{name}.weight"] = 1 + 0.2 * torch.randn(dim)
            tensors[f"{layer}eh_proj.weight"] = 0.2 * torch.randn(dim, 2 * dim)
            tensors[f"{layer}embed_tokens.weight"] = embedding.clone()
            tensors[f"{layer}shared_head.head.weight"] = tensors.get(
                "lm_head.weight", embedding).clone()
        save_file(tensors, path, metadata={"format": "pt"})
        json_path = folder / "config.json"
        fields = {**json.loads(json_path.read_text()),
                  "num_hidden_layers": config.num_hidden_layers, "num_nextn_predict_layers": depth}
        json_path.write_text(json.dumps(fields))

    return make


def formulas_are_those_of_transformers(tmp):
    """Its layers for speculative decoding, which it only runs: logits of every position they know."""
    for number, (config, depth) in enumerate(MODELS.values()):
        folder = tmp / f"formulas{number}"
        maker(depth)(config, folder)
        ours = torch_run.Model(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64,
                                                      attn_implementation="eager")
        theirs.set_experts_implementation("eager")
        further = MtpModel(theirs, depth).double()
        for layer, block in zip(further.layers, ours.mtp):
            layer.mtp_block = block
            for name in ("enorm", "hnorm", "eh_proj"):
                getattr(layer, name).weight = getattr(block, name).weight
            layer.post_norm.weight = block.shared_head.norm.weight
        ids = torch.randint(256, (1, 12))
        batch = torch_run.MicroBatch([[((i, 1), 0) for i in [*ids[0].tolist(), 0]]], False, depth)
        with torch.no_grad(), torch_run.only_float64():
            rotary = theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
            further.rotary_emb = rotary
            h = theirs.model(ids, use_cache=False).last_hidden_state
            for k in range(1, depth + 1):
                h = further.forward_layer(k - 1, h[:, :-1], torch.arange(12 - k)[None], None,
                                          input_ids=ids[:, k:])
                found = ours.forward(batch)[0][k][:12 - k]
                error = (theirs.lm_head(h)[0] - found).abs().max() / found.abs().max()
                assert error < 1e-10, (config.model_type, k, error)
    print("formulas of transformers", flush=True)


def files_are_read_and_written(tmp):
    """Nothing is dropped without a word: not by a conversion, not where a run has no such layers."""
    config, depth = MODELS["glm4_moe"]
    folder = tmp / "published"
    maker(depth)(config, folder)
    there = load_file(folder / "model.safetensors")
    assert golden_test.run(torch_test.MOESH, "convert", folder, tmp / "same")
    same = torch_test.tensors(tmp / "same")
    assert set(same) == set(there), set(same) ^ set(there)
    assert all(torch.equal(same[n], t) for n, t in there.items())

    # transformers does not compute the layer: its goldens are those of the rest.
    golden_test.record(folder, tmp / "golden.safetensors", seed=1)
    assert "holds" in golden_test.run(torch_test.MOESH, "verify", "--golden",
                                      tmp / "golden.safetensors", "--model", f"hf:{folder}",
                                      "--mesh", "tp=2,ep=2")

    train = [torch_test.MOESH, "train", f"--model=hf:{folder}", "--steps=1", "--checkpoint.enable"]
    without = golden_test.served.run(
        [*train, "--model.num_mtp_layers=0", f"--checkpoint.folder={tmp / 'without'}",
         f"--metrics.folder={tmp / 'without'}"])
    assert without.returncode == 0, without.stderr
    for text in ("are left out", "model.layers.3.eh_proj.weight", "model.num_mtp_layers"):
        assert text in without.stderr, without.stderr
    saved = torch_test.tensors(tmp / "without" / "step-00000001")
    assert not any(name.startswith("model.layers.3.") for name in saved)
    fields = json.loads((tmp / "without" / "step-00000001" / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 0, fields

    # A copy that is none is told of.
    other = tmp / "other"
    other.mkdir()
    name = "model.layers.3.embed_tokens.weight"
    save_file({**there, name: there[name] + 1}, other / "model.safetensors",
              metadata={"format": "pt"})
    (other / "config.json").write_text((folder / "config.json").read_text())
    told = golden_test.served.run([torch_test.MOESH, "convert", other, tmp / "converted"])
    assert told.returncode == 0 and f"'{name}' is not 'model.embed_tokens.weight'" in told.stderr, \
        told.stderr

    # What transformers saves has the field and not the layers.
    lacking = tmp / "lacking"
    lacking.mkdir()
    save_file({n: t for n, t in there.items() if "layers.3." not in n},
              lacking / "model.safetensors", metadata={"format": "pt"})
    (lacking / "config.json").write_text((folder / "config.json").read_text())
    taken = [*train[:2], f"--model=hf:{lacking}", "--steps=1", f"--metrics.folder={tmp / 'taken'}"]
    without = golden_test.served.run(taken)
    assert without.returncode == 0 and "left out" not in without.stderr, without.stderr
    refused = golden_test.served.run([*taken, "--model.num_mtp_layers=1"])
    assert refused.returncode != 0, refused.stdout
    for text in ("model.layers.3.", "model.num_mtp_layers"):
        assert text in refused.stderr, refused.stderr
    print("files", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesh", type=pathlib.Path)
    parser.add_argument("seed", type=int, nargs="?", default=random.randrange(10**6))
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    torch_test.MOESH = golden_test.MOESH = arguments.moesh.resolve()
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    # Rounding grows tenfold in a step of the tied model: no run of it.
    cases = [(m, s, meshes) for m in MODELS for s, meshes in ALL.items()
             if (m, s) != ("deepseek_v3 tied", "mtp")] if arguments.all else SAMPLED
    with tempfile.TemporaryDirectory() as tmp:
        for i, (model, setting, meshes) in enumerate(cases):
            config, depth = MODELS[model]
            torch_test.compare(pathlib.Path(tmp), model, config, setting, meshes,
                               arguments.seed + i, maker(depth))
        torch.manual_seed(arguments.seed)
        formulas_are_those_of_transformers(pathlib.Path(tmp))
        files_are_read_and_written(pathlib.Path(tmp))


if __name__ == "__main__":
    main()
