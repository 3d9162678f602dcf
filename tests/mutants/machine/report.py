"""What became of the mistakes: reasons of those that change nothing, and tables for
docs/mutants.md."""

import collections
import dataclasses
import fnmatch
import re
import textwrap

import sites


class Fault(Exception):
    pass


@dataclasses.dataclass
class Reason:
    where: str
    pattern: tuple  # file, function, kind, text; * stands for any text
    reason: str
    used: bool = False

    def fits(self, m):
        return all(fnmatch.fnmatchcase(a, re.sub(r"([\[\]?])", r"[\1]", p)) if "*" in p else a == p
                   for a, p in zip(m.key(), self.pattern))


def read_reasons(path):
    """equivalent.txt: file | function | kind | text, and the reason on indented lines below."""
    reasons = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace():
            if not reasons:
                raise Fault(f"{where}: a reason without an entry")
            reasons[-1].reason = f"{reasons[-1].reason} {line.strip()}".strip()
            continue
        words = [w.strip() for w in line.split(" | ", 3)]
        if len(words) != 4:
            raise Fault(f"{where}: write 'file | function | kind | text', not '{line}'")
        reasons.append(Reason(where, tuple(words), ""))
    for r in reasons:
        if not r.reason:
            raise Fault(f"{r.where}: no reason: indent it on the lines below")
    return reasons


def match_reasons(mistakes, reasons):
    """The reason of each survivor that has one; entries that match no site are a fault."""
    found, faults = {}, []
    for r in reasons:
        hits = [m for m in mistakes if r.fits(m)]
        if not hits:
            faults.append(f"{r.where}: no site is {' | '.join(r.pattern)}: it changed, or is gone")
        for m in hits:
            found.setdefault(m.number, r)
    if faults:
        raise Fault("\n".join(faults))
    return found


COLUMNS = ("made", "refused", "killed", "failed", "crashed", "stalled", "endless", "exited",
           "equivalent", "survived", "not run")


def counted(mistakes, reasons, row_of):
    rows = collections.defaultdict(collections.Counter)
    for m in mistakes:
        state = m.state or "not run"
        if state == "survived" and m.number in reasons:
            state = "equivalent"
        for row in (row_of(m), "all"):
            rows[row].update(["made", state] + ([m.how] if m.state == "killed" else []))
    return rows


def table(mistakes, reasons, title, row_of, order):
    """In Markdown, for docs/mutants.md."""
    rows = counted(mistakes, reasons, row_of)
    columns = [c for c in COLUMNS if rows["all"][c]]
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in (*order, "all"):
        if rows[row]["made"]:
            lines.append(f"| {row} | " + " | ".join(str(rows[row][c]) for c in columns) + " |")
    return "\n".join(lines)


def folder_of(m):
    """moesh/nn/dispatch/local.cpp is of nn; moesh/comm/mesh.cpp of comm/mesh."""
    return m.file.split("/")[1].replace("comm", "comm/mesh")


def tables(mistakes, reasons):
    """By kind, by folder, and which suites killed how many."""
    suites = collections.Counter(
        re.sub(r"^\w+/|/.*", "", m.by.split(".")[0] if "." in m.by else m.by)
        for m in mistakes if m.state == "killed")
    alone = sum(m.alone for m in mistakes)
    return "\n\n".join([
        table(mistakes, reasons, "kind", lambda m: m.site.kind, sites.KINDS),
        table(mistakes, reasons, "folder", folder_of,
              ("types", "comm/mesh", "spmd", "nn", "models", "pipeline", "train")),
        "Killed by: " + ", ".join(
            f"{name or '(before any test)'} {n}" for name, n in suites.most_common()) + ".",
        f"Compiled by themselves: {alone}."])


def put_counts(page, counts):
    """Between the marks of the page, with lines of a hundred columns at most."""
    begin, end = "<!-- counts: begin -->\n", "<!-- counts: end -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise Fault(f"{page} has no marks: write {begin.strip()} and {end} where the counts go")
    lines = "\n".join(line if line.startswith("|") else textwrap.fill(line, 100)
                      for line in counts.splitlines())
    page.write_text(text[:text.index(begin) + len(begin)] + lines + "\n" +
                    text[text.index(end):], encoding="utf-8")
