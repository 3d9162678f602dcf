"""Parameters and gradients of any PyTorch model as a safetensors file, for `moesh compare`.

This file needs only torch, of any version: copy it next to the code that is to be debugged.

    loss.backward()
    dump(model, "two_ranks.safetensors", loss=loss, logits=logits)

Under torch.distributed every rank calls it and rank 0 writes: DTensors and the shards of FSDP
become whole tensors. The page docs/debug_another_framework.md finds a mistake with it.
"""

import ctypes
import json
import os
import re
import warnings
import zlib

import torch

# What torch.compile, FSDP and activation checkpointing put into the names of what they wrap.
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL"}
_DTYPES = {getattr(torch, key): name for key, name in _NAMES.items() if hasattr(torch, key)}


def gradient_name(name):
    return f"d({name})"


def dump(model, path, *, per_rank=False, **tensors):
    """Writes the parameters of a torch.nn.Module (or a dict of tensors), `tensors`, and the
    gradients from the last layer to the first: of several that differ the first is then nearest to
    the cause.

    Under torch.distributed, ranks that hold different values of a tensor which is not sharded are
    named in a warning: a reduction is missing there. per_rank=True writes what each rank holds
    instead, as PATH.rank0.safetensors, and so on: for shards that torch knows nothing of.
    """
    path = os.fspath(path)
    rank, num_ranks = _world()
    if per_rank:
        path = f"{path.removesuffix('.safetensors')}.rank{rank}.safetensors"
    with _whole_parameters(model):
        found = _found(model, tensors)
        disagreement = _write(path, found, per_rank, writes=per_rank or rank == 0,
                              num_ranks=num_ranks)
    if disagreement and rank == 0:
        warnings.warn(
            f"ranks hold different values of {', '.join(disagreement)}, which none of them holds a "
            f"shard of; {path} has those of rank 0. Gradients of what all ranks hold must be "
            "reduced. (For shards that are not DTensors: per_rank=True.)", stacklevel=2)
    return path


def tensors_of(given):
    """What dump() would write, as a dict of tensors that share memory with the model's where they
    are whole. Also of a dict of tensors, arrays and numbers."""
    with _whole_parameters(given):
        return {name: _whole(value) for name, value in _found(given, {}).items()}


def _found(given, more):
    """Name -> tensor, as it is held."""
    if not isinstance(given, torch.nn.Module):
        return {name: _tensor(name, value) for name, value in {**given, **more}.items()}
    while isinstance(given, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        given = given.module
    found = {_WRAPPERS.sub("", name): p for name, p in given.named_parameters()}
    gradients = [(gradient_name(name), p.grad) for name, p in found.items() if p.grad is not None]
    found.update((name, _tensor(name, value)) for name, value in more.items())
    found.update(reversed(gradients))
    return found


def _tensor(name, value):
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} is of type {type(value).__name__}; dump and compare take "
                            "tensors, arrays and numbers") from None
    return value


def _whole(value):
    """Of a DTensor the full tensor: all ranks of its mesh must come here."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class _whole_parameters:
    """Where parts of the model are FSDP's first kind, their parameters are whole inside."""

    def __init__(self, model):
        self.scope = None
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        # Without importing it where nobody has: a build of torch may have no distributed package.
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in modules):
            from torch.distributed.fsdp import FullyShardedDataParallel
            if not all(m._use_orig_params for m in modules
                       if isinstance(m, FullyShardedDataParallel)):
                raise ValueError("FullyShardedDataParallel keeps gradients as one flat tensor; "
                                 "create it with use_orig_params=True")
            self.scope = FullyShardedDataParallel.summon_full_params(
                model, writeback=False, with_grads=True)

    def __enter__(self):
        if self.scope:
            self.scope.__enter__()

    def __exit__(self, *raised):
        if self.scope:
            self.scope.__exit__(*raised)


def _world():
    d = torch.distributed
    if not d.is_available() or not d.is_initialized():
        return 0, 1
    return d.get_rank(), d.get_world_size()


def _write(path, found, per_rank, writes, num_ranks):
    """One tensor after the other, so that no more than one is whole at a time. Returns the names on
    which ranks disagree."""
    for name, value in found.items():
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} is of {value.dtype}, which safetensors has no name for; "
                            "convert it first, as in x.to(torch.float32)")
    # Wide elements first, as the format's own library does: then all are aligned.
    order = sorted(found, key=lambda name: -found[name].element_size())
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        value = _local(found[name]) if per_rank else found[name]
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape),
                        "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = path + ".new"
    file = open(beside, "wb") if writes else None
    sums = {}
    try:
        if file:
            file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            value = _local(found[name]) if per_rank else _whole(found[name])
            value = value.detach().cpu().contiguous()
            if num_ranks > 1 and not per_rank:
                sums[name] = zlib.crc32(_bytes(value))
            if file:
                file.write(_bytes(value))
    finally:
        if file:
            file.close()
    if file:
        os.replace(beside, path)
    if not sums:
        return []
    everyone = [None] * num_ranks
    torch.distributed.all_gather_object(everyone, sums)
    if any(s.keys() != sums.keys() for s in everyone):
        warnings.warn(f"ranks hold different tensors (stages of a pipeline?); {path} has those of "
                      "rank 0: per_rank=True writes a file for each", stacklevel=3)
    return [name for name in order if any(s.get(name, sums[name]) != sums[name] for s in everyone)]


def _local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def _bytes(value):
    """The memory of a contiguous tensor on the host, as it is."""
    return (ctypes.c_char * value.nbytes).from_address(value.data_ptr()) if value.numel() else b""
