"""What became of the mistakes: reasons of those that change nothing, and tables for
bench/results/mutants.md."""

import collections
import dataclasses
import fnmatch
import re

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


COLUMNS = ("made", "refused", "killed", "equivalent", "survived", "not run")
FOLDERS = ("base", "types", "comm/mesh", "spmd", "fsdp", "nn", "models", "pipeline", "optim", "data",
           "config", "train")


def counted(mistakes, reasons, row_of):
    rows = collections.defaultdict(collections.Counter)
    for m in mistakes:
        state = m.state or "not run"
        if state == "survived" and m.number in reasons:
            state = "equivalent"
        rows[row_of(m)].update(["made", state])
    return rows


def table(rows, title, order):
    """In Markdown, with a row for all."""
    lines = [f"| {title} | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    every = sum(rows.values(), collections.Counter())
    for row, counts in (*((r, rows[r]) for r in order if r in rows), ("all", every)):
        lines.append(f"| {row} | " + " | ".join(str(counts[c]) for c in COLUMNS) + " |")
    return "\n".join(lines)


def folder_of(m):
    """moesh/nn/dispatchers.cpp is of nn; moesh/comm/mesh.cpp of comm/mesh."""
    return m.file.split("/")[1].replace("comm", "comm/mesh")


def by_folder(mistakes, reasons):
    return table(counted(mistakes, reasons, folder_of), "folder", FOLDERS)


def summary(mistakes, reasons):
    """By kind, by folder, and which suites killed how many."""
    suites = collections.Counter(
        re.sub(r"^\w+/|/.*", "", m.by.split(".")[0] if "." in m.by else m.by)
        for m in mistakes if m.state == "killed")
    return "\n\n".join([
        table(counted(mistakes, reasons, lambda m: m.site.kind), "kind", sites.KINDS),
        by_folder(mistakes, reasons),
        "Killed by: " + ", ".join(
            f"{name or '(before any test)'} {n}" for name, n in suites.most_common()) + "."])


def rows_of(text):
    rows = {}
    for line in re.findall(r"^\| (?!folder |all )(.*) \|$", text, re.MULTILINE):
        name, *numbers = line.split(" | ")
        rows[name] = collections.Counter(dict(zip(COLUMNS, map(int, numbers))))
    return rows


def put_counts(page, counts):
    """Between the marks of the page: the rows of folders that were run take the place of theirs."""
    begin, end = "<!-- counts: begin -->\n", "<!-- counts: end -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise Fault(f"{page} has no marks: write {begin.strip()} and {end} where the counts go")
    before, rest = text.split(begin)
    kept, after = rest.split(end)
    rows = {**rows_of(kept), **rows_of(counts)}
    page.write_text(f"{before}{begin}{table(rows, 'folder', FOLDERS)}\n{end}{after}",
                    encoding="utf-8")
