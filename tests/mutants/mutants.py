#!/usr/bin/env python3
"""Applies the mistakes of tests/mutants/<path>.cpp.mutants to a copy of moesh/<path>.cpp.

    mutants.py copy ROOT ENTRIES OUTPUT  one source with all of its mistakes, chosen at run time
    mutants.py table ROOT OUTPUT         what must find each mistake, for the test program
    mutants.py listed ROOT               entries and docs/mutants.md name the same mistakes, tests
                                         and README.md the same checks
    mutants.py --self-test

README.md in this folder says how an entry is written. A copy has the lines of its source, so that
the compiler's messages point at the source: a mistake goes before the text that it replaces, on
the same line.
"""

import dataclasses
import pathlib
import re
import sys
import tempfile

FOLDER = pathlib.Path("tests") / "mutants"
SUFFIX = ".mutants"
HEADER = '#include "tests/mutants/on.h"\n'
STATEMENT = re.compile(r"(if|for|while|do|switch|try)\b.*\}|\{.*\}|.*;", re.DOTALL)
KEYS = ("in", "before", "at", "-", "+")


class Fault(Exception):
    pass


@dataclasses.dataclass
class Mutant:
    name: str
    where: str  # file and line of the entry
    found_by: list = dataclasses.field(default_factory=list)  # (check, settings, what it says)
    lines: dict = dataclasses.field(default_factory=dict)  # by key

    def text(self, key):
        return "\n".join(self.lines.get(key, ())).strip()

    def fault(self, text):
        return Fault(f"{self.where}: mutant '{self.name}': {text}")


def parse_line(mutants, where, line):
    key, _, rest = line.partition(" ")
    rest = rest.strip()
    if key == "mutant":
        if not re.fullmatch(r"[a-z]\w*", rest):
            raise Fault(f"{where}: '{rest}' is not a name: small letters, digits and _")
        mutants.append(Mutant(rest, where))
    elif not mutants:
        raise Fault(f"{where}: an entry begins with 'mutant NAME'; this line is '{line}'")
    elif key == "found":
        match = re.fullmatch(r"by (\w+) ?([^:]*): (.+)", rest)
        if not match:
            raise Fault(f"{where}: write 'found by CHECK SETTINGS: WHAT IT SAYS', not '{line}'")
        mutants[-1].found_by.append(match.groups())
    elif key in KEYS:
        mutants[-1].lines.setdefault(key, []).append(rest)
    else:
        raise Fault(f"{where}: a line begins with mutant, found by, {', '.join(KEYS)}, not '{key}'")


def validate(mutant):
    m = mutant
    if not m.found_by:
        raise m.fault("no line 'found by': a mistake that no check finds says nothing")
    if len(set(m.found_by)) != len(m.found_by):
        raise m.fault("a line 'found by' is there twice")
    if bool(m.text("-")) == bool(m.text("before")):
        raise m.fault("it needs - lines (the text to replace) or a 'before' line, and not both")
    if m.text("before") and not m.text("+"):
        raise m.fault("with 'before' it needs + lines: what to insert")
    if "//" in m.text("+"):
        raise m.fault("a comment in its + lines; comments have lines that begin with #")
    if "//" in m.text("-").rpartition("\n")[2]:
        raise m.fault("its text ends in a comment; end it before")


def parse(root, path):
    mutants = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parse_line(mutants, f"{path.relative_to(root).as_posix()}:{number}", line)
    for m in mutants:
        validate(m)
    return mutants


def unique(mutants):
    seen = {}
    for m in mutants:
        if m.name in seen:
            raise m.fault(f"the name is taken ({seen[m.name].where})")
        seen[m.name] = m
    return seen


def pattern(text):
    """The tokens of the text with any white space between them: the formatter may wrap a line."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    words = [re.match(r"\w", t) is not None for t in tokens]
    found = re.escape(tokens[0])
    for i in range(1, len(tokens)):
        found += (r"\s+" if words[i - 1] and words[i] else r"\s*") + re.escape(tokens[i])
    return re.compile((r"(?<!\w)" if words[0] else "") + found + (r"(?!\w)" if words[-1] else ""))


def line_of(source, position):
    return source.count("\n", 0, position) + 1


def column_of(source, position):
    return position - source.rfind("\n", 0, position)


def find_once(mutant, text, source, name, span, at=""):
    """Where the text is within the span of the source; it must be there once."""
    found = [m.span() for m in pattern(text).finditer(source, *span)]
    if at:
        line, _, column = at.partition(":")
        found = [f for f in found if line_of(source, f[0]) == int(line)
                 and int(column or column_of(source, f[0])) == column_of(source, f[0])]
    if len(found) == 1:
        return found[0]
    place = name
    if span != (0, len(source)):
        place += " within its 'in' text"
    if at:
        place += f" at {at}"
    shown = "".join(f"\n    {line}" for line in text.splitlines())
    if not found:
        raise mutant.fault(f"its text is not in {place}:{shown}")
    lines = ", ".join(str(line_of(source, f[0])) for f in found)
    raise mutant.fault(f"its text is {len(found)} times in {place} (lines {lines}); an 'in' line "
                       f"gives more of the text around it:{shown}")


def locate(mutant, source, name):
    at = mutant.text("at")
    if at and not re.fullmatch(r"\d+(:\d+)?", at):
        raise mutant.fault(f"'at {at}': write the line, or line:column, where its text begins")
    span = 0, len(source)
    if mutant.text("in"):
        span = find_once(mutant, mutant.text("in"), source, name, span)
    text = mutant.text("-") or mutant.text("before")
    begin, end = find_once(mutant, text, source, name, span, at)
    if mutant.text("-"):
        return begin, end
    if re.sub(r"//[^\n]*", "", source[:begin]).rstrip()[-1:] not in (";", "{", "}"):
        raise mutant.fault(f"'before {text}': a statement cannot be inserted there, only "
                           "after ; or a brace")
    return begin, begin


def chosen(mutant, original):
    """C++ that is the mistake while it is on, and the original at all other times."""
    on = f'::moesh::mutants::on("{mutant.name}")'
    mistake = " ".join(mutant.text("+").split("\n"))
    if mutant.text("before"):
        return f"if ({on}) {{ {mistake} }} "
    if STATEMENT.fullmatch(mutant.text("-")):
        return f"if ({on}) {{ {mistake} }} else {{ {original} }}"
    if not mistake:
        raise mutant.fault("an expression cannot be left out: it needs + lines")
    return f"({on} ? ({mistake}) : ({original}))"


def apply(mutants, source, name):
    """The source with all mistakes. One may lie within the text of another, or have the same."""
    places = [(*locate(m, source, name), m) for m in mutants]
    places.sort(key=lambda p: (p[0], p[1] > p[0], -p[1]))  # insertions, then outer before inner
    places.reverse()  # so that the next one is the last

    def render(begin, end):
        out = ""
        while places and places[-1][0] < end:
            b, e, mutant = places.pop()
            if e > end:
                raise mutant.fault("its text overlaps that of another mutant, and neither "
                                   "contains the other")
            out += source[begin:b] + chosen(mutant, render(b, e))
            begin = e
        return out + source[begin:end]

    return f'{HEADER}#line 1 "{name}"\n' + render(0, len(source))


def all_entries(root):
    return sorted((root / FOLDER).rglob("*" + SUFFIX))


def write(path, text):
    """A file that is right already keeps its time: what depends on it is not built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def copy(root, entries, output):
    name = "moesh/" + entries.relative_to(root / FOLDER).as_posix().removesuffix(SUFFIX)
    if not name.endswith(".cpp"):
        raise Fault(f"{entries}: only sources (.cpp) have entries: code that includes a header and "
                    "is not compiled again would not see its mistakes")
    mutants = parse(root, entries)
    unique(mutants)
    write(output, apply(mutants, (root / name).read_text(encoding="utf-8"), name))


def table(root, output):
    rows = ""
    for m in unique(m for path in all_entries(root) for m in parse(root, path)).values():
        for found in m.found_by:
            rows += "{" + ", ".join(f'R"({text})"' for text in (m.name, *found)) + "},\n"
    write(output, rows)


def listed(root):
    entries = unique(m for path in all_entries(root) for m in parse(root, path))
    page = (root / "docs" / "mutants.md").read_text(encoding="utf-8")
    rows = set()
    for lines in re.findall(r"^\| mistake \| mutant \|.*\n((?:\|.*\n)*)", page, re.MULTILINE):
        rows |= set(re.findall(r"^\|[^|]*\| `(\w+)` \|", lines, re.MULTILINE))
    faults = [f"{m.where}: mutant '{m.name}' is not in a table of docs/mutants.md"
              for m in entries.values() if m.name not in rows]
    faults += [f"docs/mutants.md: no entry under {FOLDER} has the name '{name}'"
               for name in sorted(rows - entries.keys())]
    tests = "".join(p.read_text(encoding="utf-8") for p in (root / "tests").glob("*/mutants_test.cpp"))
    provided = set(re.findall(r'mutants::Provide \w+\("(\w+)"', tests))
    checks = (root / FOLDER / "README.md").read_text(encoding="utf-8").partition("| check |")[2]
    rows = re.findall(r"^\|([^|]*)\|", checks.partition("\n\n")[0], re.MULTILINE)
    described = set(re.findall(r"`(\w+)`", "".join(rows)))
    faults += [f"the check '{name}' is provided, or is in a row of {FOLDER / 'README.md'}, not both"
               for name in sorted(provided ^ described)]
    if faults or not entries:
        raise Fault("\n".join(faults) or f"no entries under {root / FOLDER}")
    print(f"{len(entries)} mutants, each with an entry and a row of docs/mutants.md")


SELF_TEST_SOURCE = """int f(int a) {
  int b = a +
          1;
  if (b > 1) b = 2;
  return b + f(a + 1);
}
"""
FOUND = "\nfound by layer tp=2: output\n"
RIGHT = [  # entries, and a part of the copy; M and N stand for on("m") and on("n")
    ("- b + f(a + 1)\n+ b", "return (M ? (b) : (b + f(a + 1)));"),
    ("- b > 1\n+ b >=\n+ 1", "if ((M ? (b >= 1) : (b > 1))) b = 2;"),
    ("in int b = a + 1;\n- a + 1\n+ a", "= (M ? (a) : (a +\n          1));"),
    ("in f(a + 1)\n- a + 1\n+ a", "f((M ? (a) : (a + 1)))"),
    ("at 5\n- a + 1\n+ a", "f((M ? (a) : (a + 1)))"),
    ("at 5:16\n- a + 1\n+ a", "f((M ? (a) : (a + 1)))"),
    ("- b = 2;", "if (M) {  } else { b = 2; }"),
    ("- if (b > 1) b = 2;\n+ b = 3;", "if (M) { b = 3; } else { if (b > 1) b = 2; }"),
    ("before return b\n+ if (!a) return 0;", "\n  if (M) { if (!a) return 0; } return b"),
    ("- b > 1\n+ 1\nmutant n" + FOUND + "- if (b > 1) b = 2;",
     "if (N) {  } else { if ((M ? (1) : (b > 1))) b = 2; }"),
    ("- b > 1\n+ 1\nmutant n" + FOUND + "- b > 1\n+ 0", "if ((M ? (1) : ((N ? (0) : (b > 1)))))"),
    ("before if (b > 1)\n+ b = 0;\nmutant n" + FOUND + "- if (b > 1) b = 2;",
     "  if (M) { b = 0; } if (N) {  } else { if"),
    ("# A comment.\n\n- b > 1\n+ 1", 'on.h"\n#line 1 "moesh/nn/f.cpp"\nint f(int a) {\n'),
]
WRONG = [  # entries, and a part of the fault
    ("- b < 1\n+ b", "f.cpp.mutants:1: mutant 'm': its text is not in moesh/nn/f.cpp:\n    b < 1"),
    ("- a + 1\n+ a", "mutant 'm': its text is 2 times in moesh/nn/f.cpp (lines 2, 5)"),
    ("in return b\n- a\n+ b", "mutant 'm': its text is not in moesh/nn/f.cpp within its 'in'"),
    ("in a + 1\n- a\n+ b", "mutant 'm': its text is 2 times in moesh/nn/f.cpp (lines 2, 5)"),
    ("at 4\n- a + 1\n+ a", "mutant 'm': its text is not in moesh/nn/f.cpp at 4"),
    ("at 5:17\n- a + 1\n+ a", "mutant 'm': its text is not in moesh/nn/f.cpp at 5:17"),
    ("at x\n- b > 1\n+ b", "'at x': write the line"),
    ("- b > 1\n+ b\nmutant n" + FOUND + "- 1) b\n+ b", ":5: mutant 'n': its text overlaps"),
    ("- b > 1", "an expression cannot be left out"),
    ("+ b", "it needs - lines"),
    ("before return b", "what to insert"),
    ("before b = 2;\n+ b = 3;", "'before b = 2;': a statement cannot be inserted there"),
    ("- b > 1\n+ b // why", "a comment in its + lines"),
    ("- b > 1 // why\n+ b", "ends in a comment"),
    ("found by layer\n- b > 1\n+ b", "write 'found by CHECK"),
    ("found by layer tp=2: output\n- b > 1\n+ b", "'found by' is there twice"),
    ("- b > 1\n+ b\nmutant m" + FOUND + "- b = 2;", "the name is taken"),
    ("* b > 1", "not '*'"),
    ("mutant Not-a-name", "is not a name"),
    ("- b = 2;\nmutant n\n- b > 1\n+ b", "mutant 'n': no line 'found by'"),
]


def self_test():
    for text, expected, fails in [(*c, False) for c in RIGHT] + [(*c, True) for c in WRONG]:
        for letter in "MN":
            on = f'::moesh::mutants::on("{letter.lower()}")'
            expected = re.sub(rf"\b{letter}\b", on, expected)
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            entries, output = root / FOLDER / "nn" / ("f.cpp" + SUFFIX), root / "f.cpp"
            write(root / "moesh" / "nn" / "f.cpp", SELF_TEST_SOURCE)
            write(entries, f"mutant m{FOUND}{text}\n")
            try:
                copy(root, entries, output)
                got, failed = output.read_text(encoding="utf-8"), False
            except Fault as e:
                got, failed = str(e), True
        same_lines = failed or got.count("\n") == SELF_TEST_SOURCE.count("\n") + 2
        if failed != fails or expected not in got or not same_lines:
            raise Fault(f"self-test: {text!r} should give {expected!r}; it gave {got!r}")
    try:
        parse_line([], "f:1", "- b > 1")
        raise Fault("self-test: a text without a name is taken")
    except Fault as e:
        if "an entry begins with 'mutant NAME'" not in str(e):
            raise
    print(f"self-test: {len(RIGHT)} good entries and {len(WRONG)} bad ones are judged right")


def main():
    commands = {"copy": copy, "table": table, "listed": listed, "--self-test": self_test}
    name, *paths = sys.argv[1:] or [""]
    if name not in commands:
        sys.exit(__doc__)
    try:
        commands[name](*map(pathlib.Path, paths))
    except Fault as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
