"""The functions of the package, over those of the extension module."""

import json
import os
import sys

from . import _moesh
from ._errors import error
from ._moesh import Comparison, Error, RunSummary  # noqa: F401
from ._settings import values_of
from .tensor_dump import tensors_of


def train(config=None, *, dataset=None, on_step=None, **options):
    """Trains as `moesh train` does, in this process, and returns a RunSummary.

    config     a dict (dotted keys or nested), a dataclass, or the path of a TOML file; `options`
               override it, such as steps=100, mesh="tp=2,ep=2", training={"seed": 1}
    dataset    your own data: dataset[index] is data.sequence_length + 1 token ids, as an array, a
               tensor or a list, or a tuple of them, the document number of each (or None) and
               optionally the loss mask. If it has a len(), it starts again at its end. Optional:
               vocab_size, and describe(), a text by which a resumed run recognises the data.
               Threads call it in any order, one at a time.
    on_step    called with the record of each step, a dict as in metrics.jsonl; an exception in it
               ends the run

    The GIL is released except for these calls. Ctrl-C ends the run after the step, which is saved
    if checkpoints are enabled, and then raises KeyboardInterrupt; a second Ctrl-C ends the process.
    """
    values = values_of(config, options)
    sys.stdout.flush()  # moesh prints by itself
    return _moesh.train(values, dataset, on_step)


def verify(config=None, *, num_steps=2, sweep=None, **options):
    """Compares the mesh with one rank, as `moesh verify` does: {"holds": ..., "meshes": [...]}.

    num_steps  optimizer steps to compare
    sweep      8 or "5-8": every mesh of up to 8, or of 5 to 8 ranks, instead of the configured one
    """
    meshes = None if sweep is None else str(sweep)
    return _moesh.verify(values_of(config, options), num_steps, meshes)


def estimate(config=None, *, search=None, memory=None, most=10, cluster=None, **options):
    """A dict of parameters, memory of a rank and bytes that it sends in a step, without a run.

    cluster="h100x8:256", or the path of a TOML file: seconds of a step instead of bytes, as in
    `moesh estimate --cluster`.

    search=True with a cluster, or search=64 for that many H100: a list of such dicts, of the fastest
    meshes, schedules, recompute modes and micro-batches that fit into a GPU, or into `memory`
    ("80GiB").
    """
    values = values_of(config, options)
    named = None if cluster is None else os.fspath(cluster)
    if search is None or search is False:
        return _moesh.estimate(values) if named is None else _moesh.estimate_in_time(values, named)
    if named is not None and not isinstance(search, bool):
        raise error("config", f"search is {search} (Python), and all GPUs of a cluster are "
                    "used; write search=True")
    if named is None and isinstance(search, bool):
        raise error("config", "search is True (Python) and there is no cluster; name one, as in "
                    'cluster="h100x8:8", or write the number of GPUs, as in search=64')
    return _moesh.search(values, named, int(search), None if memory is None else str(memory), most)


def print_config(config=None, **options):
    """The effective value of every option, and where it came from, as TOML."""
    return _moesh.print_config(values_of(config, options))


def tokenize(inputs, *, tokenizer, out, **options):
    """Texts or chats as a file of tokens, as `moesh tokenize` makes them: a dict of counts.

    inputs     a path or a list of them
    tokenizer  the folder of a model, whose chat template is used, or its tokenizer.json
    out        the beginning of the names of the files: out.bin, out.idx, and out.mask of chats
    options    those of the command: append_eod=True, chats="sharegpt", roles=["assistant", "tool"],
               chat_template="file", chat_fields={"messages": "turns"},
               template_variable={"enable_thinking": False}, no_end_of_turn=True, on_error="skip"
    """
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    args = ["tokenize", "--tokenizer", os.fspath(tokenizer), "--out", os.fspath(out)]
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            args += [name] if value else []
        elif key == "template_variable":
            for variable, its in value.items():
                args.append(f"{name}={variable}={json.dumps(its)}")
        elif isinstance(value, dict):
            args.append(name + "=" + ",".join(f"{a}={b}" for a, b in value.items()))
        elif isinstance(value, (list, tuple)):
            args.append(name + "=" + ",".join(map(str, value)))
        elif value is not None:
            args.append(f"{name}={value}")
    return _moesh.tokenize(args + [os.fspath(path) for path in inputs])


def compare(a, b, *, tolerance=None, rename=None):
    """Two sets of tensors, name by name, as `moesh compare` does; b is the reference.

    a, b       a dict of tensors or arrays, a torch.nn.Module (its parameters and gradients), or the
               path of a safetensors file or of a folder of them
    rename     {pattern: replacement}: the name in b of what a calls so (regular expressions)
    """
    if rename is not None and not isinstance(rename, dict):
        raise TypeError(f"rename is {rename!r}; it takes a dict, as in {{'^module': 'model'}}")
    return _moesh.compare(_side(a), _side(b), tolerance, list((rename or {}).items()))


def _side(given):
    if isinstance(given, (str, os.PathLike)):
        return os.fspath(given)
    return list(tensors_of(given).items())


def load_metrics(run):
    """The records of a run, one dict a step, from its folder (metrics.folder), its metrics.jsonl,
    or the RunSummary that train() returned. A last line that is still being written is left out."""
    path = run.folder if isinstance(run, RunSummary) else os.fspath(run)
    if os.path.isdir(path):
        path = os.path.join(path, "metrics.jsonl")
    if not path or not os.path.exists(path):
        raise error("data", f"there is no '{path or 'metrics.jsonl'}'; name the folder of a run "
                    "(metrics.folder), which must not be empty")
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break
            try:
                records.append(json.loads(line))
            except ValueError as wrong:
                raise error("data", f"{path}:{number} is not JSON ({wrong}); is it the "
                            "metrics.jsonl of a run?") from None
    return records
