#!/usr/bin/env python3
"""Records what transformers computes for a checkpoint, for `moesh verify --golden`.

record_golden.py FOLDER OUT                          random tokens
record_golden.py FOLDER OUT --tokens FILE            input_ids, and labels if any, of safetensors
record_golden.py FOLDER OUT --documents 4            of about 4 tokens, each run by itself
record_golden.py FOLDER OUT --adapter LORA           with a LoRA adapter of PEFT, which is trained

FOLDER is a Hugging Face checkpoint (config.json and safetensors). OUT becomes one safetensors file,
all in float32, or with --dtype float64 in float64:
    input_ids [B, L], labels [B, L]   int64; a label is the target of its position, -100: none
    document_starts [B, L]            with --documents: the position where each token's begins
    logits [B, L, V], loss []         the mean over the positions that count
    grad.<name>                       of every parameter, under its name on disk in FOLDER; with
                                      --adapter of every parameter of the adapter, under its name
                                      in LORA
"""

import argparse
import contextlib
import pathlib
import re
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


def names_on_disk(folder):
    names = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    # A model of text and images, such as published Llama 4: the names in its text model.
    text = "language_model."
    if any(name.startswith(text) for name in names):
        return {name.removeprefix(text) for name in names if name.startswith(text)}
    return names


def random_tokens(vocab, batch, length, seed, ignored):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (batch, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return ids[:, :-1].contiguous(), labels


def given_tokens(path):
    tensors = load_file(path)
    ids = tensors["input_ids"]
    if "labels" in tensors:
        return ids, tensors["labels"]
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return ids, labels


def gradients_by_name_on_disk(model, on_disk):
    """transformers stacks experts when it loads them; here they get back the names and shapes that
    they have in the folder."""
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    stacked = {name: g for name, g in gradients.items() if name not in on_disk}
    found = {name: g for name, g in gradients.items() if name in on_disk}
    found.update({name: g for name, g in revert_weight_conversion(model, stacked).items()})
    strange = sorted(set(found) - on_disk)
    if strange:
        sys.exit(f"no tensor of the folder is called {strange[0]} ({len(strange)} in all)")
    kept = dict(model.named_buffers())
    buffers = set(kept) | set(revert_weight_conversion(model, kept))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    # Layers behind the last are for multi-token prediction, which transformers does not compute.
    behind = {name for name in on_disk if (layer := re.match(r"model\.layers\.(\d+)\.", name))
              and int(layer[1]) >= model.config.num_hidden_layers}
    without = sorted(on_disk - set(found) - buffers - tied - behind)
    if without:
        sys.exit(f"{without[0]} of the folder has no gradient ({len(without)} in all)")
    return found


def random_documents(labels, mean, seed):
    """Where the document of each token begins; a label beyond its end does not count."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(labels.shape, generator=generator) < 1 / mean
    begins[:, 0] = True
    labels[:, :-1][begins[:, 1:]] = -100
    return torch.where(begins, torch.arange(labels.shape[1]), 0).cummax(1).values


def logits_of(model, ids, starts):
    """Of every document by itself, as if there were no other."""
    if starts is None:
        return model(input_ids=ids, use_cache=False).logits.float()
    rows = []
    for sequence, begin in zip(ids, starts):
        _, lengths = torch.unique_consecutive(begin, return_counts=True)
        documents = sequence.split(lengths.tolist())
        parts = [model(input_ids=d[None], use_cache=False).logits[0].float() for d in documents]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@contextlib.contextmanager
def widened(dtype):
    """Norms, softmaxes and routers ask for float32 by name: in a run of float64 they get that."""
    before = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    if dtype == torch.float64:
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before[:3]
        torch.set_default_dtype(before[3])


def adapter_gradients(model):
    """By the names in adapter_model.safetensors."""
    return {
        name.replace(".default", ""): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def record(
    folder,
    out,
    tokens=None,
    batch=2,
    length=13,
    seed=0,
    ignored=0.1,
    documents=0,
    adapter=None,
    dtype="float32",
):
    """Writes the file, and returns a line that says what it holds."""
    dtype = getattr(torch, dtype)
    # The plain implementations: every other one is a faster way to the same numbers, or nearly.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if dtype == torch.float64:
        with widened(dtype):
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.eval()
    ids, labels = (
        given_tokens(tokens)
        if tokens
        else random_tokens(model.config.vocab_size, batch, length, seed, ignored)
    )

    starts = random_documents(labels, documents, seed) if documents else None
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    with widened(dtype):
        logits = logits_of(model, ids, starts)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        loss.backward()

    tensors = {"input_ids": ids, "labels": labels, "logits": logits.detach(), "loss": loss.detach()}
    if starts is not None:
        tensors["document_starts"] = starts
    if adapter:
        gradients = adapter_gradients(model)
    else:
        gradients = gradients_by_name_on_disk(model, names_on_disk(folder))
    for name, gradient in gradients.items():
        tensors["grad." + name] = gradient.detach().contiguous().clone()
    save_file(tensors, out)
    size = f"{ids.shape[0]} x {ids.shape[1]} tokens"
    return f"{out}: {size}, loss {loss.item():.6f}, {len(gradients)} gradients"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument(
        "--tokens", type=pathlib.Path, help="safetensors file with input_ids and perhaps labels"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ignored", type=float, default=0.1, help="fraction of random labels that are -100"
    )
    parser.add_argument(
        "--documents", type=int, default=0, help="mean length of the documents of a sequence; 0: one"
    )
    parser.add_argument("--adapter", type=pathlib.Path, help="folder of a LoRA adapter of PEFT")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    print(record(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
