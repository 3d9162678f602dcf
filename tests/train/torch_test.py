#!/usr/bin/env python3
"""Runs of training against PyTorch, number by number.

    torch_test.py MOESH [SEED]           a run of each model, of seven only two steps
    torch_test.py MOESH [SEED] --all     all settings of each model, on several meshes
    torch_test.py MOESH --record FILE    the runs of reference_check.cpp, for tests without Python

torch_run.py computes the runs: losses and their parts, gradient norm, learning rate, tokens and
choices of each expert, expert bias, validation, and the weights after the last step.
"""

import argparse
import json
import pathlib
import random
import re
import shutil
import sys
import struct
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch_run  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402

MESHES = ["tp=1", "dp_shard=2,tp=2,ep=2", "pp=2,cp=2,ep=2"]
ALL_WORDS = dict(vocab_size=257)
MODELS = {
    "deepseek_v3": golden_test.deepseek(**ALL_WORDS, n_group=2, topk_group=1, q_lora_rank=12),
    "qwen3_moe": golden_test.qwen3(**ALL_WORDS, mlp_only_layers=[0], norm_topk_prob=True),
    "mixtral": golden_test.mixtral(**ALL_WORDS, sliding_window=3),
    "llama4": golden_test.llama4(**ALL_WORDS),
    "gpt_oss": golden_test.gpt_oss(**ALL_WORDS),
}
NEWER = {
    "glm4_moe": golden_test.glm4(**ALL_WORDS, n_group=2, topk_group=1),
    "qwen3_next": golden_test.qwen3_next(**ALL_WORDS),
    "granitemoe": golden_test.granite(**ALL_WORDS),
    "olmoe": golden_test.olmoe(**ALL_WORDS),
    "minimax_m2": golden_test.minimax(**ALL_WORDS),
    "qwen2_moe": golden_test.qwen2(**ALL_WORDS, mlp_only_layers=[0]),
    "glm4_moe_lite": golden_test.glm4_lite(**ALL_WORDS),
}
TIED = {"qwen3_moe": golden_test.qwen3(**ALL_WORDS, tie_word_embeddings=True),
        "mixtral": golden_test.mixtral(**ALL_WORDS, tie_word_embeddings=True)}

# Norms decay in the last group, because it says so.
GROUPS = {"optimizer.group.0.match": "experts", "optimizer.group.0.lr_scale": 2.0,
          "optimizer.group.0.weight_decay": 0.0,
          "optimizer.group.1.match": r"^model\.norm\.", "optimizer.group.1.weight_decay": 0.5}
# No value is a default of moesh.
BASE = {
    "training.steps": 6, "training.global_batch_size": 8, "micro_batches": 2,
    "training.max_norm": 0.7, "data.sequence_length": 13, "data.shuffle": True, "data.seed": 5,
    "data.packing": "cut", "data.document_mask": "auto", "optimizer.name": "adamw",
    "optimizer.lr": 3e-3, "optimizer.beta1": 0.8, "optimizer.beta2": 0.9, "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.2, "optimizer.momentum": 0.7, "lr_scheduler.kind": "cosine",
    "optimizer.muon_momentum": 0.9, "optimizer.nesterov": False,
    "lr_scheduler.warmup_steps": 2, "lr_scheduler.min_lr_factor": 0.15,
    "lr_scheduler.decay_ratio": 0.5, "moe.load_balance_coeff": 0.03,
    "moe.balance_loss_weight": 0.05, "moe.balance_over": "sequence", "moe.z_loss_weight": 0.003,
    "validation.interval": 2, "validation.steps": 2,
}
SETTINGS = {  # what is set besides, and the files to train on
    "cosine": ({**GROUPS}, [("a.jsonl", 1.0)]),
    "mixture": ({"lr_scheduler.kind": "linear", "lr_scheduler.min_lr_factor": 0.4,
                 "training.max_norm": 2.0, "moe.balance_over": "micro_batch"},
                [("a.jsonl", 3.0), ("b.txt", 1.0)]),
    "best_fit": ({**GROUPS, "data.packing": "best_fit", "lr_scheduler.kind": "wsd",
                  "optimizer.name": "sgd", "optimizer.lr": 0.02, "micro_batches": 4,
                  "moe.balance_over": "micro_batch"}, [("a.jsonl", 1.0)]),
    "constant": ({"data.document_mask": "false", "lr_scheduler.kind": "constant",
                  "lr_scheduler.warmup_steps": 4, "training.max_norm": 0.0, "micro_batches": 1},
                 [("a.jsonl", 1.0)]),
    # A token that ends its document has no label: every second step has none at all.
    "skipped": ({"data.sequence_length": 1, "training.global_batch_size": 1, "micro_batches": 1,
                 "data.shuffle": False, "validation.steps": 40, "training.max_skipped_steps": 2},
                [("letters.jsonl", 1.0)]),
    "muon": ({**GROUPS, "optimizer.name": "muon", "lr_scheduler.kind": "linear"},
             [("a.jsonl", 1.0)]),
    # Multi-token prediction, where the model has it (mtp_test.py).
    "mtp": ({**GROUPS, "training.mtp_loss_weight": 0.4}, [("a.jsonl", 1.0)]),
    # Conversations: of some tokens it is known that they are only read.
    "masked": ({"data.packing": "best_fit", "data.sequence_length": 17},
               [("chats.bin", 3.0), ("more.bin", 1.0)]),
    "clipped": ({"optimizer.qk_clip": 1.5}, [("a.jsonl", 1.0)]),
    "clipped by muon": ({"optimizer.qk_clip": 1.5, "optimizer.name": "muon"}, [("a.jsonl", 1.0)]),
    # Experts at random, which no router has chosen.
    "replayed": ({}, [("a.jsonl", 1.0)]),
    "brief": ({"training.steps": 2, "lr_scheduler.warmup_steps": 1,
               "moe.balance_over": "micro_batch"}, [("a.jsonl", 1.0)]),
}

MODELS_OF = {
    # The others store the matrices of an expert in another order.
    "muon": ("deepseek_v3", "qwen3_moe", "mixtral"),
    # The others normalise queries and keys.
    "clipped": ("deepseek_v3", "mixtral", "gpt_oss"),
    "clipped by muon": ("deepseek_v3", "mixtral"),
    "brief": NEWER,
}
BESIDE = [("deepseek_v3", "muon"), ("deepseek_v3", "masked"), ("deepseek_v3", "replayed"),
          ("deepseek_v3", "clipped by muon"), ("mixtral", "clipped"), ("gpt_oss", "clipped")]


def write_texts(folder, seed):
    draw = random.Random(seed)

    def words(least, most):
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(least, most)))

    def lines(texts):
        return "".join(json.dumps({"text": t}) + "\n" for t in texts)

    texts = {"a.jsonl": lines(words(1, 24) for _ in range(40)), "b.txt": words(300, 300),
             "letters.jsonl": lines("abcdefgh"), "held_out.jsonl": lines(
                 words(1, 24) for _ in range(30)), "held_out.txt": words(90, 90)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_chats(prefix, count, seed):
    """Documents of questions, which are only read, and answers; files as moesh tokenize has them.
    Some have no answer, some nothing else."""
    draw = random.Random(seed)
    ids, mask, lengths = [], [], []
    for _ in range(count):
        begin = len(ids)
        for turn in range(draw.randint(1, 5)):
            length = draw.randint(1, 9)
            ids += [draw.randrange(256) for _ in range(length)]
            mask += [turn % 2] * length
        lengths.append(len(ids) - begin)
    mask[sum(lengths[:2]):sum(lengths[:3])] = [1] * lengths[2]
    starts = [0, *np.cumsum(lengths)[:-1].tolist()]
    prefix.with_suffix(".bin").write_bytes(np.array(ids, np.uint16).tobytes())
    prefix.with_suffix(".mask").write_bytes(bytes(mask))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        + np.array(lengths, np.int32).tobytes() + (2 * np.array(starts, np.int64)).tobytes()
        + np.arange(count + 1, dtype=np.int64).tobytes())


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors"))
            for name, t in load_file(path).items()}


def num_dp(mesh):
    return int((re.search(r"dp_shard=(\d+)", mesh) or [0, 1])[1])


def options_of(settings, files, mesh="tp=1"):
    given = {k: v for k, v in settings.items() if k != "micro_batches"}
    given["data.batch_size"] = settings["training.global_batch_size"] // num_dp(mesh) // settings[
        "micro_batches"]
    for i, (path, weight) in enumerate(files["train"]):
        if len(files["train"]) == 1:
            given["data.path"] = path
        else:
            given[f"data.source.{i}.path"], given[f"data.source.{i}.weight"] = path, weight
    for i, (name, path) in enumerate(files["validation"].items()):
        given[f"validation.source.{i}.name"], given[f"validation.source.{i}.path"] = name, path
    return [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items()]


def train(folder, initial, mesh, options):
    golden_test.run(
        MOESH, "train", f"--model=hf:{initial}", "--dtype=float64", f"--mesh={mesh}",
        "--checkpoint.enable", f"--checkpoint.folder={folder}", f"--metrics.folder={folder}",
        "--checkpoint.interval=3", *options)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Numbers that metrics.jsonl rounds.
TOLERANCES = {"lr": 1e-8, "expert_bias": 1e-5}


def flat(validation):
    """Of one file: loss, and for each depth of multi-token prediction mtp.0.loss and so on."""
    return {"loss": validation["loss"], **{
        f"mtp.{k}.{name}": value for k, depth in enumerate(validation.get("mtp", []))
        for name, value in depth.items()}}


def differs(found, wanted):
    """The first number of a record that is another, or nothing."""
    for name, value in wanted.items():
        theirs = found.get(name, 0.0)
        if isinstance(value, dict):
            complaint = next(filter(None, (differs(flat(theirs[n]), v) for n, v in value.items())),
                             "")
            if complaint:
                return f"{name} {complaint}"
            continue
        allowed = TOLERANCES.get(name, 1e-10)
        a, b = (torch.tensor(v, dtype=torch.float64) for v in (theirs, value))
        if a.shape != b.shape or (a - b).abs().max() > allowed * b.abs().max().clamp(min=1e-3):
            return f"{name} is {theirs}, and in PyTorch {value}"
    return ""


def compare_records(name, records, wanted):
    assert len(records) == len(wanted), (name, len(records), len(wanted))
    for found, expected in zip(records, wanted):
        complaint = differs(found, expected)
        assert not complaint, f"{name}, step {found['step']}: {complaint}"


def compare_weights(name, found, wanted, before):
    """Relative to how far each tensor moved; some do not, where a sequence has one token."""
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    worst = 0
    for key, value in wanted.items():
        movement = (value - before[key]).norm().clamp(min=1e-4)
        error = (found[key] - value).norm() / movement
        allowed = 1e-10 if found[key].dtype == torch.float64 else 1e-6  # the bias, on disk
        assert error < allowed, f"{name}, {key}: {error} of its movement"
        worst = max(worst, error.item())
    return worst


def prepare(folder, setting, seed):
    """The settings of a run, and its files."""
    folder.mkdir()
    write_texts(folder, seed)
    changed, trained_on = SETTINGS[setting]
    held_out = {"held": folder / "held_out.jsonl", "plain": folder / "held_out.txt"}
    if trained_on[0][0].endswith(".bin"):
        for i, name in enumerate(("chats", "more", "held_out")):
            write_chats(folder / name, 40, seed + i)
        held_out = {"held": folder / "held_out.bin"}
    return {**BASE, **changed}, {"train": [(folder / f, w) for f, w in trained_on],
                                 "validation": held_out}


def without_copies(found):
    """Layers of multi-token prediction have the embedding and the head once more in files."""
    head = found.get("lm_head.weight", found["model.embed_tokens.weight"])
    for name in [n for n in found if re.search(r"layers.*\.(embed_tokens|shared_head\.head)\.", n)]:
        original = found["model.embed_tokens.weight"] if "embed_tokens" in name else head
        assert torch.equal(found.pop(name), original), name
    return found


def write_routing(folder, initial, settings, seed):
    """A file for each step, of another type each; some tokens are left to the routers."""
    folder.mkdir()
    model, draw = torch_run.Model(initial), np.random.default_rng(seed)
    tokens = settings["training.global_batch_size"] * settings["data.sequence_length"]
    sizes = len(model.routers), tokens, model.routers[0].num_experts
    for step in range(settings["training.steps"]):
        experts = draw.random(sizes).argsort(-1)[..., :model.top_k]
        kind = (np.int16, np.uint8, np.int32, np.int64)[step % 4]
        if kind != np.uint8:
            experts[draw.random(sizes[:2]) < 0.2] = -1
        np.save(folder / f"step-{step + 1:08}.npy", experts.astype(kind))


def compare_routing(given, recorded):
    for path in sorted(given.iterdir()):
        experts, written = np.load(path), np.load(recorded / path.name)
        chosen = (experts >= 0).all(-1)
        assert written.dtype == np.int16 and written.shape == experts.shape, path
        assert (written[chosen] == experts[chosen]).all() and (written >= 0).all(), path


def compare(tmp, model, config, setting, meshes, seed, make=golden_test.make, resumes=True):
    name = f"{model}, {setting}"
    folder = tmp / name
    settings, files = prepare(folder, setting, seed)
    torch.manual_seed(seed)
    make(config, folder / "initial")
    if setting == "replayed":
        settings["moe.replay"] = folder / "routing"
        write_routing(folder / "routing", folder / "initial", settings, seed)
    wanted, trained = torch_run.run(folder / "initial", files, settings)
    trained.save_pretrained(folder / "wanted")
    weights = tensors(folder / "wanted"), tensors(folder / "initial")
    for mesh in meshes:
        at = folder / mesh
        options = options_of(settings, files, mesh) + [f"--moe.record={at / 'recorded'}"]
        compare_records(f"{name} on {mesh}", train(at, folder / "initial", mesh, options), wanted)
        if setting == "replayed":
            compare_routing(folder / "routing", at / "recorded")
        last = at / f"step-{settings['training.steps']:08}"
        worst = compare_weights(f"{name} on {mesh}", without_copies(tensors(last)), *weights)
        print(f"{name} on {mesh}: weights within {worst:.1e} of their movement", flush=True)
    if settings["training.steps"] < 6 or not resumes:
        return
    # The second half again, on another mesh.
    shutil.rmtree(at / "step-00000006")
    other = "tp=4,ep=4" if model == "qwen3_next" else "cp=2,ep=2"  # which takes no cp
    records = train(at, folder / "initial", other, options_of(settings, files))
    compare_records(f"{name}, resumed", records[3:], wanted[3:])
    compare_weights(f"{name}, resumed", without_copies(tensors(at / "step-00000006")), *weights)


def numbers_of(record):
    """As reference_check.cpp names them; what the others follow from comes first."""
    numbers = {"lr": record["lr"], "tokens": record["tokens"], "skipped": int(record["skipped"])}
    for layer, (counts, bias) in enumerate(zip(record["expert_counts"], record["expert_bias"])):
        numbers.update({f"expert {e} of layer {layer}": n for e, n in enumerate(counts)})
        numbers.update({f"least bias of layer {layer}": bias[0],
                        f"largest bias of layer {layer}": bias[1]})
    numbers.update({n: record[n] for n in (
        "loss", *torch_run.AUXILIARY, "total_loss", "grad_norm")})
    for name, values in record.get("validation", {}).items():
        numbers.update({f"validation {name}" + (f" {n}" if n != "loss" else ""): v
                        for n, v in values.items()})
    return numbers


def record(tmp, path):
    """Runs from weights of moesh's own, which a step of nearly no length leaves as they are."""
    runs = {}
    recorded = [*zip(MODELS, SETTINGS), ("deepseek_v3", "mtp")]  # all of texts
    for model, setting in recorded:
        folder = tmp / setting
        settings, files = prepare(folder, setting, seed=1)
        begin = {**settings, "training.steps": 1, "optimizer.lr": 1e-300,
                 "lr_scheduler.warmup_steps": 0, "moe.load_balance_coeff": 0}
        model_options = [f"--model={model}:tiny", "--model.vocab_size=257"]
        if setting == "mtp":
            model_options.append("--model.num_mtp_layers=2")
        golden_test.run(MOESH, "train", *model_options, "--dtype=float64", "--checkpoint.enable",
                        f"--checkpoint.folder={folder}", f"--metrics.folder={folder}",
                        *options_of(begin, files))
        records, _ = torch_run.run(folder / "step-00000001", files, settings)
        used = [f for f, _ in files["train"]] + list(files["validation"].values())
        runs[setting] = {
            "options": model_options + [
                o.replace(str(folder), "FOLDER") for o in options_of(settings, files)],
            "files": {f.name: f.read_text() for f in used},
            "steps": [numbers_of(r) for r in records]}
        print(f"{model}, {setting}: recorded", flush=True)
    lines = re.sub(r'(?<=[\[,{] )(?=\{"lr"|"options|"files|"steps|"\w+": \{"options)', "\n",
                   json.dumps(runs))
    path.write_text(f'R"json({lines})json"\n', encoding="utf-8")


def balance_loss_is_that_of_transformers():
    """torch_run's own formula, beside the library's, which is top_k times it."""
    torch.manual_seed(0)
    logits = torch.randn(50, 8, dtype=torch.float64)
    ours = torch_run.balance_loss(logits, logits.softmax(-1), 3, 50)
    with torch_run.only_float64():
        theirs = load_balancing_loss_func((logits,), 8, 3)
    assert abs(ours - theirs / 3) < 1e-12, (ours, theirs)


def main():
    global MOESH
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesh", type=pathlib.Path)
    parser.add_argument("seed", type=int, nargs="?", default=random.randrange(10**6))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--record", type=pathlib.Path)
    arguments = parser.parse_args()
    MOESH = arguments.moesh.resolve()
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    balance_loss_is_that_of_transformers()
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        if arguments.record:
            return record(tmp, arguments.record)
        for i, (model, config) in enumerate({**MODELS, **NEWER}.items()):
            for j, setting in enumerate(SETTINGS):
                meshes = MESHES if arguments.all else [MESHES[i % 3]]
                if setting == "skipped":  # one sequence, which no two ranks can divide
                    meshes = MESHES[:1]
                if setting == "mtp":  # of mtp_test.py
                    continue
                if model not in MODELS_OF.get(setting, {**MODELS, **NEWER}):
                    continue
                if setting == "masked":
                    meshes = MESHES
                if model == "qwen3_next":
                    meshes = [m for m in meshes if "cp" not in m]
                sampled = setting == "brief" if model in NEWER else (
                    i == j or (model, setting) in BESIDE)
                if arguments.all or sampled:
                    compare(tmp, model, config, setting, meshes, arguments.seed + 10 * i + j,
                            resumes=arguments.all or i == j)
        for model, config in TIED.items() if arguments.all else ():
            compare(tmp, f"{model} tied", config, "cosine", MESHES, arguments.seed)


if __name__ == "__main__":
    main()
