#!/usr/bin/env python3
"""The pages: 100 columns besides tables and output, and no link to a file that is not there.

pages_test.py ROOT           every page of the tree
pages_test.py --self-test    long lines and dead links in a made-up page are found
"""

import pathlib
import re
import sys
import tempfile

MAX_COLUMNS = 100
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


def check(root):
    folders = ["", "docs", "moesh", "tests", "bench", "configs", "examples", "python"]
    pages = [page for folder in folders for page in sorted((root / folder).glob("*.md"))]
    return [f"{p.relative_to(root)}:{c}" for p in pages for c in complaints_of(p)], len(pages)


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
    print(f"self-test: {len(cases)} cases are judged right")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    complaints, num_pages = check(pathlib.Path(sys.argv[1]))
    if complaints or num_pages == 0:
        sys.exit("\n".join(complaints) or f"no page in {sys.argv[1]}: pass the root of the tree")
    print(f"{num_pages} pages are as they should be")


if __name__ == "__main__":
    main()
