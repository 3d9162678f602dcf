#!/usr/bin/env python3
"""Greps the library against what its pages promise: the #include lines against the table of what may depend on what, and the
escapes from the types against the list of those that a test compares with one rank.

layers_test.py <root of the tree>    every file under moesh/, apps/ and python/ keeps to the table
layers_test.py --self-test           mistakes in a made-up tree are found, what is allowed is not
"""

import pathlib
import re
import sys
import tempfile

BELOW_TRAIN = ["types", "formats", "tokenizer", "pipeline", "kernels", "comm", "spmd", "fsdp", "nn", "models", "optim", "data", "checkpoint"]
# Folder -> the folders which it may include, besides itself and base (errors, checks, logging: for everyone).
MAY_INCLUDE = {
    "base": [],
    "types": [],
    "formats": [],
    "tokenizer": ["formats"],
    "pipeline": [],
    "kernels": [],
    "comm": ["types"],  # the mesh has Axes, uneven shards are Pieces
    "spmd": ["types", "comm"],
    "fsdp": ["types", "comm", "spmd", "kernels"],  # casts of parameters
    "nn": ["types", "comm", "spmd", "fsdp", "kernels"],  # token positions, and the mesh which dispatchers work on
    "models": ["nn", "fsdp", "spmd", "kernels", "formats"],  # typed tensors and parameters, which kernels, tables of tensors on disk; no group, no rank
    "optim": ["fsdp", "spmd", "kernels", "formats"],
    "data": ["spmd", "formats", "tokenizer"],
    "checkpoint": ["comm", "spmd", "fsdp", "kernels", "formats"],  # ranks agree before a checkpoint gets its name; how weights are quantized
    "config": ["formats", "kernels", "comm", "nn", "models", "optim", "data", "pipeline"],  # their names
    "train": ["config", *BELOW_TRAIN],
    "verify": ["train", "config", *BELOW_TRAIN],
    "estimate": ["train", "config", *BELOW_TRAIN],
    "generate": ["train", "config", *BELOW_TRAIN],
    "report": ["formats"],  # a page of files that a run has written
    "cli": ["verify", "estimate", "generate", "report", "train", "config",
            *BELOW_TRAIN],
    "apps": ["cli"],
    "python": ["cli", "verify", "estimate", "train", "config", *BELOW_TRAIN],
}
TORCH = ("ATen/", "c10/", "torch/")
# Folder -> how external includes that it must not have begin.
MUST_NOT_INCLUDE = {
    "base": TORCH,
    "types": TORCH,
    "formats": TORCH,
    "tokenizer": TORCH,
    "report": TORCH,
    "pipeline": TORCH,  # schedules are data: no tensor
    "kernels": ("torch/csrc/autograd",),
}
# The rules of the types are to be read in one sitting: all headers of moesh/types besides token.h, together.
MAX_TYPE_LINES = 300
# Every escape from the types outside of moesh/spmd, moesh/fsdp and moesh/types: file, the text that names it, and the test that compares what
# it promises with one rank (all but those of GradNorm and Edge also show that a layout which is not true is found).
ESCAPES = [
    ("moesh/nn/experts.cpp", "assume<out>", "tests/nn/layouts_test.cpp", "Layouts, ExpertsGivePartialSums"),
    ("moesh/nn/router.h", "assume<out>", "tests/nn/layouts_test.cpp", "Layouts, LogitsAreThoseOfEachToken"),
    ("moesh/nn/experts.h", "assume<out>", "tests/nn/layouts_test.cpp", "Layouts, AnMlpIsAPartialSum"),
    ("moesh/nn/experts.h", "assume<hidden>", "tests/nn/layouts_test.cpp", "Layouts, AnMlpIsAPartialSum"),
    ("moesh/nn/router.cpp", "declare<Dense{T, P, P}>", "tests/nn/layouts_test.cpp", "Layouts, SumsOfASequenceArePartialOnCpAndTp"),
    ("moesh/nn/router.cpp", "declare<Dense{P, P, P}>", "tests/nn/layouts_test.cpp", "Layouts, PendingCountsAreAPartialSum"),
    ("moesh/nn/tokens.cpp", "assume<Dense{T, R, R}>", "tests/nn/layouts_test.cpp", "Layouts, OwnTokensAreCutFromWhatCpAndTpHaveWhole"),
    ("moesh/nn/vocabulary.cpp", "assume<Dense{T, T, P}>", "tests/nn/layouts_test.cpp", "Layouts, AnEmbeddingIsAPartialSum"),
    ("moesh/nn/vocabulary.cpp", "assume<Dense{T, T, R}>", "tests/nn/layouts_test.cpp", "Layouts, TheBestWordIsThatOfTheWholeVocabulary"),
    ("moesh/nn/vocabulary.cpp", "assume<Dense{P, P, I}>", "tests/nn/layouts_test.cpp", "Layouts, ALossOfTheVocabularyIsTheSameOnTp"),
    ("moesh/optim/optimizer.cpp", "assume<Dense{P, P, P}>", "tests/optim/grad_norm_test.cpp", "GradNorm, IsThatOfOneRankOnEveryMesh"),
    ("moesh/train/step.cpp", "assume<Dense{P, I, I}>", "tests/train/step_test.cpp", "Steps, CountsTheValidTokensOfAllRanksOnce"),
    ("moesh/train/step.cpp", "assume<Dense{P, P, P}>", "tests/train/step_test.cpp", "Steps, AWrongLabelIsNamedAndNothingMovesOnAnyRank"),
    ("moesh/train/validation.cpp", "assume<Dense{P, I, I}>", "tests/train/validation_test.cpp", "Validation, IsTheLossOfTheSameSequencesInTraining"),
]
ESCAPE = re.compile(r"\b(?:assume|declare)\b\s*[<(]")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def complaints_of(path, folder):
    """What is wrong with the includes of one file, as (line number, sentence)."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, target = match.groups()
        if target.startswith("python/") and folder == "python":
            continue
        if target.startswith("moesh/"):
            wanted = target.split("/")[1]
            allowed = sorted({folder, "base", *MAY_INCLUDE[folder]})
            if wanted not in allowed:
                yield number, f"{folder} may not include {target}: it may include {', '.join(allowed)}"
        elif quote == '"':
            yield number, f'"{target}" is not from the root: write "moesh/<folder>/<file>.h", and <...> for external headers'
        elif target.startswith(MUST_NOT_INCLUDE.get(folder, ())):
            yield number, f"{folder} may not include <{target}>: this folder is to compile and to be tested without it"
        elif path.suffix in {".cu", ".cuh"} and target.startswith(TORCH):
            yield number, f"<{target}> in a device source: it sees raw pointers and sizes; a .cpp file beside it unpacks the tensors"
        elif path.suffix == ".h" and target == "torch/torch.h":
            yield number, "<torch/torch.h> in a header costs seconds in every file: include the narrow header"


def escapes_of(root):
    """The lines outside of moesh/spmd, moesh/fsdp and moesh/types that escape from the types, as (file, line number, line)."""
    for path in sorted((root / "moesh").rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix not in SUFFIXES or parts[1] in ("spmd", "fsdp", "types"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for _ in ESCAPE.findall(line):
                yield "/".join(parts), number, line.strip()


def complaints_about_escapes(root, escapes):
    """Where the tree and the list of escapes differ; a test that the list names must be there."""
    open_entries = list(escapes)
    for where, number, line in escapes_of(root):
        entry = next((e for e in open_entries if e[0] == where and e[1] in line), None)
        if entry is None:
            yield f"{where}:{number}: '{line}' escapes from the types: derive the layout, or test it against one rank and put it on the list"
        else:
            open_entries.remove(entry)
    for file, text, _, _ in open_entries:
        yield f"{file}: '{text}' is on the list of escapes and not in the file"
    for file, text, test_file, name in escapes:
        test = root / test_file
        if not test.exists() or f"({name})" not in test.read_text(encoding="utf-8"):
            yield f"{file}: '{text}' is to be checked by {name} of {test_file}, which is not there"


def check(root):
    """All complaints about the tree, and the number of files that were read."""
    complaints, num_files = [], 0
    roots = [root / name for name in ("moesh", "apps", "python")]
    for path in sorted(p for r in roots for p in r.rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        num_files += 1
        parts = path.relative_to(root).parts
        folder = parts[1] if parts[0] == "moesh" else parts[0]
        where = "/".join(parts)
        if folder not in MAY_INCLUDE:
            complaints.append(f"{where}: folder '{folder}' is not in the table: add it to tests/layers_test.py and CONTRIBUTING.md")
            continue
        complaints += [f"{where}:{number}: {text}" for number, text in complaints_of(path, folder)]
    type_headers = [p for p in (root / "moesh" / "types").glob("*.h") if p.name != "token.h"]
    num_lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in type_headers)
    if num_lines >= MAX_TYPE_LINES:
        complaints.append(f"moesh/types: {num_lines} lines of headers besides token.h; they stay under {MAX_TYPE_LINES}")
    return complaints, num_files


def self_test():
    cases = [  # file, its line, a part of the complaint ('': it is fine)
        ("moesh/comm/a.h", '#include "moesh/types/layout.h"', ""),
        ("moesh/comm/mpi/a.cpp", '#include "moesh/comm/group.h"', ""),
        ("moesh/kernels/cpu/a.cpp", "#include <ATen/core/Tensor.h>", ""),
        ("moesh/base/a.h", "#include <vector>", ""),
        ("moesh/base/a.h", '// #include "moesh/types/layout.h"', ""),
        ("apps/main.cpp", '#include "moesh/cli/commands.h"', ""),
        ("moesh/comm/a.h", '#include "moesh/spmd/tensor.h"', "comm may not include moesh/spmd/tensor.h"),
        ("moesh/base/a.h", '#include "moesh/types/layout.h"', "base may not include"),
        ("moesh/kernels/aten/a.cpp", '  #  include "moesh/comm/group.h"', "kernels may not include"),
        ("moesh/models/a.cpp", '#include "moesh/comm/group.h"', "models may not include"),
        ("moesh/types/a.h", "#include <ATen/core/Tensor.h>", "types may not include <ATen/core/Tensor.h>"),
        ("moesh/base/a.cpp", "#include <c10/util/Exception.h>", "base may not include"),
        ("moesh/formats/a.cpp", "#include <torch/torch.h>", "formats may not include"),
        ("moesh/kernels/a.cpp", "#include <torch/csrc/autograd/variable.h>", "kernels may not include"),
        ("moesh/kernels/cuda/a.cu", "#include <ATen/core/Tensor.h>", "device source"),
        ("moesh/nn/a.h", "#include <torch/torch.h>", "narrow header"),
        ("moesh/comm/a.cpp", '#include "group.h"', "not from the root"),
        ("moesh/extra/a.cpp", "int x;", "not in the table"),
        ("apps/main.cpp", '#include "moesh/nn/moe.h"', "apps may not include"),
        ("moesh/types/token.h", "\n" * 400, ""),
        ("moesh/types/a.h", "\n" * 400, "lines of headers"),
    ]
    for name, line, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True)
            path.write_text(f"#pragma once\n{line}\n", encoding="utf-8")
            complaints, num_files = check(pathlib.Path(folder))
        found = "\n".join(complaints)
        right = num_files == 1 and (expected in found and len(complaints) == 1 if expected else not complaints)
        if not right:
            sys.exit(f"self-test: {name} with {line!r} should give {expected or 'nothing'!r}; it gave {found!r}")
    listed = ("moesh/nn/a.cpp", "assume<Dense{T, T, P}>", "tests/nn/a_test.cpp", "A, IsASum")
    product, test = "return assume<Dense{T, T, P}>(x);", "TEST(A, IsASum) {}"
    escapes = [  # line of moesh/nn/a.cpp, line of the test, the list, a part of the complaint
        (product, test, [listed], ""),
        ("", "", [], ""),
        (product, test, [], "escapes from the types"),
        (product + product, test, [listed], "escapes from the types"),
        ("return declare<Dense{T, T, P}>(f, x);", test, [], "escapes from the types"),
        ("", test, [listed], "not in the file"),
        (product, "TEST(A, IsNothing) {}", [listed], "which is not there"),
    ]
    for line, test_line, entries, expected in escapes:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in (("moesh/nn/a.cpp", line), ("tests/nn/a_test.cpp", test_line), ("moesh/spmd/a.h", product)):
                (root / name).parent.mkdir(parents=True)
                (root / name).write_text(text + "\n", encoding="utf-8")
            found = list(complaints_about_escapes(root, entries))
        if [expected in text for text in found] != ([True] if expected else []):
            sys.exit(f"self-test: {line!r} with the list {entries} should give {expected or 'nothing'!r}; it gave {found}")
    print(f"self-test: {len(cases) + len(escapes)} cases are judged right")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1])
    complaints, num_files = check(root)
    complaints += complaints_about_escapes(root, ESCAPES)
    if num_files == 0:
        sys.exit(f"no source under {sys.argv[1]}/moesh: pass the root of the tree")
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{num_files} files keep to the table; {len(ESCAPES)} escapes from the types, each with its test")


if __name__ == "__main__":
    main()
