"""Mixture-of-experts training on one mesh of ranks: moesh from Python. See docs/python.md."""

import importlib
import os
import sys

from . import _built_for


def _import_torch():
    """torch first: it loads LibTorch, and the module of moesh finds it loaded."""
    # An idle OpenMP thread spins before it sleeps, which keeps the threads of other ranks from
    # running. libgomp reads its setting when it is loaded, so it must be there before torch is.
    is_set = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    if not is_set and "torch" not in sys.modules:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        import torch
    finally:
        if not is_set:
            os.environ.pop("OMP_WAIT_POLICY", None)
    if torch.__version__ != _built_for.TORCH:
        raise ImportError(
            f"moesh was built for torch {_built_for.TORCH}, and this is torch {torch.__version__} "
            f"({torch.__path__[0]}): LibTorch has no stable interface between them. Build moesh "
            "again in this environment: pip install --force-reinstall "
            "--no-deps /path/to/moesh; or install the torch that it was built for: "
            f"pip install torch=={_built_for.TORCH.split('+')[0]}")


def _import_engine():
    """With MPI where this machine has it: the other build of the module needs only torch."""
    try:
        engine = importlib.import_module("moesh.mpi._moesh")
    except ImportError:
        engine = importlib.import_module("moesh._moesh")
    sys.modules["moesh._moesh"] = engine


_import_torch()
_import_engine()

from ._functions import (  # noqa: E402
    Comparison, Error, RunSummary, compare, estimate, load_metrics, print_config, tokenize, train,
    verify)
from . import _chats  # noqa: E402, F401
from ._moesh import version as __version__  # noqa: E402
from .tensor_dump import dump, tensors_of  # noqa: E402

__all__ = ["Comparison", "Error", "RunSummary", "compare", "dump", "estimate", "load_metrics",
           "print_config", "tensors_of", "tokenize", "train", "verify"]
