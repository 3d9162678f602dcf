#!/usr/bin/env python3
"""A whole training step of transformers, the peer of bench_step: forward, backward, clip, AdamW.

    peer_step.py FOLDER [--batch 8] [--length 2048] [--steps 40] [--no-compile]
                 [--attention causal|sdpa|flex_attention|eager] [--lora RANK] [--checkpointing]
                 [--loads FILE]

FOLDER needs only a config.json, as `moesh convert` and checkpoints of moesh have it: weights are
random. All parameters are bfloat16 (moesh keeps float32 masters besides). --lora freezes them and
trains adapters of PEFT on attention, dense MLPs and routed experts, in float32 as PEFT makes them.
--loads writes how many tokens each expert of each MoE layer got after these steps, a line for each
layer: bench_step --routing FILE gives moesh the same loads.

The defaults are this peer at its best. Under torch.compile transformers hands attention a causal
mask that is a tensor; the function `causal` below says is_causal instead, which is 1.4 times as
fast on an H200. Models with windows or sinks need another --attention.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from transformers import (AttentionInterface, AttentionMaskInterface, AutoConfig,
                          AutoModelForCausalLM)
from transformers import __version__ as transformers_version
from transformers.masking_utils import sdpa_mask

WARM = 4


def causal(module, q, k, v, mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """Causal attention without a mask. cuDNN wants the heads of a token side by side."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling,
                                       enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).contiguous(), None


def with_adapters(model, rank):
    """PEFT's adapters on every matrix but embedding, head and router; experts are parameters."""
    import peft  # pylint: disable=import-outside-toplevel

    linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules()
                     if isinstance(m, torch.nn.Linear) and not name.endswith(("lm_head", "gate"))})
    experts = sorted({".".join(name.split(".")[-3:]) for name, p in model.named_parameters()
                      if ".experts." in name and p.dim() == 3 and "bias" not in name})
    print("adapters on", *linear, *experts)
    return peft.get_peft_model(model, peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=linear, target_parameters=experts))


def build(options):
    config = AutoConfig.from_pretrained(options.folder)
    config.use_cache = False
    config._experts_implementation = options.experts
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16,
                                                 attn_implementation=options.attention)
    if options.lora:
        model = with_adapters(model, options.lora)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model, config


def write_loads(model, ids, file):
    """Every module `experts` is called with the numbers of the chosen experts, as whole numbers."""
    layers = []

    def count(module, args, kwargs):
        chosen = next(a for a in (*args, *kwargs.values())
                      if torch.is_tensor(a) and a.dtype in (torch.int64, torch.int32))
        layers.append(torch.bincount(chosen.flatten(), minlength=module.num_experts).tolist())

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids)
    with open(file, "w", encoding="utf-8") as out:
        for loads in layers:
            print(*loads, file=out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--attention", default="causal")
    parser.add_argument("--experts", default="grouped_mm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--loads", metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"

    AttentionInterface.register("causal", causal)
    AttentionMaskInterface.register("causal", sdpa_mask)
    torch.manual_seed(0)
    if on_gpu and options.attention == "causal":  # the fastest where no mask is given
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    model, config = build(options)
    trained = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, of which "
          f"{sum(p.numel() for p in trained):,} are trained", flush=True)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    run = torch.compile(model, dynamic=False) if options.compile else model
    ids = torch.randint(0, config.vocab_size, (options.batch, options.length),
                        device=options.device)

    def seconds_of_a_step():
        begun = time.perf_counter()
        run(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = seconds_of_a_step()
    for _ in range(WARM):
        seconds_of_a_step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = sorted(seconds_of_a_step() for _ in range(options.steps))
    median = times[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0
    print(f"transformers {transformers_version}, torch {torch.__version__}, {config.model_type}: "
          f"first step {first:.1f} s, {median * 1e3:.1f} ms a step, "
          f"{options.batch * options.length / median:,.0f} tokens/s, peak {peak:.1f} GiB")
    if options.loads:
        write_loads(model, ids, options.loads)


if __name__ == "__main__":
    main()
