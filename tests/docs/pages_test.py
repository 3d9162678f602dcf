#!/usr/bin/env python3
"""The pages: 100 columns besides tables and output, no link to a file that is not there, and in
docs/walk.md no file twice.

pages_test.py ROOT           every page of the tree
pages_test.py --self-test    long lines and dead links in a made-up page are found
"""

import pathlib
import re
import sys
import tempfile

MAX_COLUMNS = 100
ENTRY = re.compile(r"^- (`[^:]*`):", re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def complaints_of(page):
    in_block = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            in_block = not in_block
            continue
        quoted = in_block or line.startswith("    ")
        if len(line) > MAX_COLUMNS and not quoted and not line.startswith("|"):
            yield f"{number}: {len(line)} columns; a page has {MAX_COLUMNS}"
        for target in LINK.findall("" if quoted else line):
            if not target.startswith("http") and not (page.parent / target).exists():
                yield f"{number}: there is no {target}"


def files_of_walk(text):
    """The files that entries of docs/walk.md name before their colon; `a/{b,c}.cpp` is two."""
    for entry in ENTRY.findall(text):
        for name in re.findall(r"`([^`]+)`", entry):
            inside = re.search(r"\{(.*)\}", name)
            for part in inside.group(1).split(",") if inside else [""]:
                yield name[: inside.start()] + part + name[inside.end() :] if inside else name


def complaints_of_walk(root, text):
    """Every file of the walk is there and is listed once; the page says how many."""
    files = list(files_of_walk(text))
    said = re.search(r"(\d+) files are listed", text)
    if not said or int(said.group(1)) != len(files):
        yield f"{len(files)} files are listed, and it says {said.group(1) if said else 'nothing'}"
    for name in sorted(set(files)):
        if not (root / name).is_file():
            yield f"there is no {name}"
        if files.count(name) > 1:
            yield f"{name} is listed {files.count(name)} times"


def complaints_of_own_model(page, source):
    """The C++ of docs/own_model.md is in the test that compiles it, but for comments and breaks."""
    def code(text):
        return re.sub(r"//.*|\s+", "", text)

    given = code(re.sub(r"//.*", "", source)) if source else ""
    for block in re.findall(r"(?:^ {7}.*\n|^\n)+", page, re.M):
        lines = re.sub(r"//.*", "", block)
        if ";" in lines and code(lines) not in given:
            yield f"tests/models/own_model_test.cpp does not have {lines.strip().splitlines()[0]}"


def check(root):
    folders = ["", "docs", "moesh", "tests", "tests/mutants", "bench", "configs", "examples", "python"]
    pages = [page for folder in folders for page in sorted((root / folder).glob("*.md"))]
    complaints = [f"{p.relative_to(root)}:{c}" for p in pages for c in complaints_of(p)]
    own, source = root / "docs" / "own_model.md", root / "tests" / "models" / "own_model_test.cpp"
    if source.exists():
        found = complaints_of_own_model(own.read_text("utf-8"), source.read_text("utf-8"))
        complaints += [f"docs/own_model.md: {c}" for c in found]
    walk = root / "docs" / "walk.md"
    if walk.exists():
        text = walk.read_text(encoding="utf-8")
        complaints += [f"docs/walk.md: {c}" for c in complaints_of_walk(root, text)]
    return complaints, len(pages)


def self_test():
    long = "word " * 30
    cases = [
        (long, "150 columns"),
        (f"| {long}", ""),
        (f"    {long}", ""),
        (f"```\n{long}\n```", ""),
        ("see [this](a.md#part)", ""),
        ("see [this](https://example.org)", ""),
        ("see [this](b.md)", "there is no b.md"),
    ]
    for text, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "a.md"
            page.write_text(text + "\n", encoding="utf-8")
            complaints, num_pages = check(pathlib.Path(folder))
        found = "\n".join(complaints)
        assert num_pages == 1 and (expected in found if expected else not found), (text, found)
    walk = list(
        complaints_of_walk(
            pathlib.Path(__file__).parent,
            "- `{pages,walk}_test.py`: a: b\n- `pages_test.py`,\n  `x.py`: c `d`: e\n2 files are listed",
        )
    )
    assert walk == ["4 files are listed, and it says 2", "pages_test.py is listed 2 times",
                    "there is no x.py"], walk
    print(f"self-test: {len(cases) + 1} cases are judged right")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    complaints, num_pages = check(pathlib.Path(sys.argv[1]))
    if complaints or num_pages == 0:
        sys.exit("\n".join(complaints) or f"no page in {sys.argv[1]}: pass the root of the tree")
    print(f"{num_pages} pages are as they should be")


if __name__ == "__main__":
    main()
