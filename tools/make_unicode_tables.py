#!/usr/bin/env python3
"""Writes moesh/tokenizer/generated/unicode_tables.cpp: what the Python package `tokenizers` takes
for a letter, a digit, a space, ...

    tools/make_unicode_tables.py > moesh/tokenizer/generated/unicode_tables.cpp

The package has four sources of Unicode (Oniguruma, the regex crate, Rust's char,
unicode-normalization), each of another version. So the tables are not made from a version of
Unicode, but by asking the package about every code point.
"""

import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

ALL = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(ALL)
CATEGORIES = (
    "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn"
).split()

def matched(regex):
    """The code points that a class of the split patterns has."""
    return set(normalizers.Replace(Regex(f"[^{regex}]"), "").normalize_str(TEXT))

def isolated(pre_tokenizer):
    """The code points that are a piece of their own between letters."""
    pieces = pre_tokenizer.pre_tokenize_str("x" + "x".join(ALL) + "x")
    return {piece for piece, _ in pieces if len(piece) == 1} - {"x"}

def kept(pre_tokenizer):
    return {c for piece, _ in pre_tokenizer.pre_tokenize_str(TEXT) for c in piece}

def ranges(members):
    """Sorted pairs (first, last)."""
    found = []
    for c in sorted(map(ord, members)):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found

def wrapped(items, indent="    "):
    lines, line = [], indent
    for item in items:
        if len(line) + len(item) + 1 > 99:
            lines.append(line.rstrip())
            line = indent
        line += item + " "
    return "\n".join([*lines, line.rstrip()])

def table(kind, name, comment, items):
    print(
        f"\n// {comment}\nconstexpr {kind} {name}Table[] = {{\n{wrapped(items)}}};\n"
        f"const std::span<const {kind}> {name} = {name}Table;"
    )

def range_table(name, comment, members):
    table("CodePointRange", name, comment, [f"{{0x{a:x}, 0x{b:x}}}," for a, b in ranges(members)])

def categories():
    of = {}
    for name in CATEGORIES:
        for c in matched(f"\\p{{{name}}}"):
            assert c not in of
            of[c] = name
    assert len(of) == len(ALL)
    runs = []
    for c in range(0x110000):
        name = of.get(chr(c), "Cs")
        if not runs or runs[-1][1] != name:
            runs.append((c, name))
    for group in "LMNPSZ":
        assert matched(f"\\p{{{group}}}") == {c for c in ALL if of[c][0] == group}
    assert matched("\\d") == {c for c in ALL if of[c] == "Nd"}
    return runs

def combining_classes():
    """Code point -> class; which ones the package knows is seen in what it puts in order."""
    nfd = normalizers.NFD().normalize_str
    low, high = "\u0334", "\u0345"  # classes 1 and 240
    known = {}
    for c in ALL:
        if c in (low, high):
            known[c] = unicodedata.combining(c)
        elif nfd("a" + c + low) == "a" + low + c or nfd("a" + high + c) == "a" + c + high:
            known[c] = unicodedata.combining(c)
            assert known[c], hex(ord(c))
    return known

def decompositions():
    """(code point, first, second or 0, whether it composes again) for all but Hangul syllables."""
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    for c in ALL:
        whole = nfd(c)
        if whole == c or 0xAC00 <= ord(c) <= 0xD7A3:
            continue
        parts = [chr(int(x, 16)) for x in unicodedata.decomposition(c).split()]
        assert 1 <= len(parts) <= 2 and nfd("".join(parts)) == whole, hex(ord(c))
        yield ord(c), ord(parts[0]), ord(parts[1]) if len(parts) == 2 else 0, nfc(whole) == c

def main():
    print(
        f"""// Written by tools/make_unicode_tables.py with tokenizers {tokenizers.__version__}.

#include "moesh/tokenizer/code_points.h"

// clang-format off
namespace moesh::tokenizer::tables {{"""
    )
    names = [*CATEGORIES, "Cs"]
    table(
        "std::string_view",
        "kCategoryNames",
        "General categories by their names in Unicode.",
        [f'"{name}",' for name in names],
    )
    table(
        "CategoryRun",
        "kCategories",
        "Where a general category begins, for \\p{...}; it lasts until the next entry.",
        [f"{{0x{c:x}, {names.index(name)}}}," for c, name in categories()],
    )
    range_table("kPatternSpaces", "\\s of split patterns.", matched("\\s"))
    range_table("kPatternWords", "\\w of split patterns.", matched("\\w"))
    range_table(
        "kNumeric",
        "What the pre-tokenizer Digits takes.",
        isolated(pre_tokenizers.Digits(individual_digits=True)),
    )
    range_table(
        "kPunctuation",
        "What the pre-tokenizer Punctuation takes.",
        isolated(pre_tokenizers.Punctuation()),
    )
    spaces = set(ALL) - kept(pre_tokenizers.WhitespaceSplit())
    assert spaces == set(ALL) - kept(pre_tokenizers.Whitespace())
    range_table("kSpaces", "White space around added tokens, and for WhitespaceSplit.", spaces)
    words = set(ALL) - spaces - isolated(pre_tokenizers.Whitespace())
    range_table("kWords", "Parts of words beside added tokens, and for Whitespace.", words)
    table(
        "CombiningClass",
        "kCombiningClasses",
        "Canonical combining classes that are not 0.",
        [f"{{0x{ord(c):x}, {k}}}," for c, k in sorted(combining_classes().items())],
    )
    table(
        "Decomposition",
        "kDecompositions",
        "Canonical decompositions, one step: what, into, and whether NFC composes it.",
        [
            f"{{0x{c:x}, 0x{a:x}, 0x{b:x}, {str(back).lower()}}},"
            for c, a, b, back in decompositions()
        ],
    )
    print("\n}  // namespace moesh::tokenizer::tables")

if __name__ == "__main__":
    main()
