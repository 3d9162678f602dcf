"""Finds places in a C++ source where a small mistake of parallelism could be made.

A tokenizer and a bracket matcher are enough because the tree is formatted by clang-format: a binary
operator has white space on both sides, the < of a template has none before it.
"""

import bisect
import dataclasses
import re

AXES = {  # what a mistaken hand would write instead: the neighbours in the same view
    "dp": ("cp", "tp"), "cp": ("tp", "dp"), "tp": ("cp", "dp"),
    "edp": ("ep", "etp"), "ep": ("etp", "edp"), "etp": ("ep", "edp"),
    "efsdp": ("ep", "edp"), "fsdp": ("dp_shard", "cp"), "dp_replicate": ("dp_shard",),
    "dp_shard": ("dp_replicate",), "kTokenAxes": ("kSequenceAxes", "dp"),
    "kSequenceAxes": ("tp", "cp"), "kExpertAxes": ("ep", "etp"),
}
# Calls that change what a value means on an axis, or move it: which argument is the value.
CALLS = {
    **dict.fromkeys(
        "all_gather reduce_scatter all_reduce enter keep pad once as_term to_experts to_owners "
        "start_to_experts all_to_all start_all_to_all start_all_gather broadcast scale to_full "
        "to_stream own_tokens start_seen_positions permute_rows spread_rows combine_rows "
        "gather_rows to_node scores_of_rows keep_first sum_over_stages".split(), 0),
    "run": 1, "gather": 1,
}
# Members that place something by rank, whose value a mistake could miss by one.
INDICES = {"start", "length", "coordinate", "owner", "stride", "start_of", "flat_start",
           "span_start", "first_position", "span_length", "mine_start", "num_local", "group_number"}
TWINS = {"send": "recv", "recv": "send", "my_ep": "my_etp", "my_etp": "my_ep",
         "num_ep": "num_etp", "num_etp": "num_ep", "send_": "recv_", "recv_": "send_",
         "num_cp": "num_tp", "num_tp": "num_cp"}
PLACES = {"R": "IP", "I": "RP", "P": "RT", "T": "FE", "F": "TE", "E": "TF"}
OTHER = {  # operators: kind, what else
    "+": ("sign", "-"), "-": ("sign", "+"),
    "*": ("factor", "/"), "/": ("factor", "*"), "%": ("factor", "/"),
    "<": ("bound", "<="), "<=": ("bound", "<"), ">": ("bound", ">="), ">=": ("bound", ">"),
    "==": ("bound", "!="), "!=": ("bound", "=="), "&&": ("bound", "||"), "||": ("bound", "&&"),
    "|": ("axes", "&"), "&": ("axes", "|"),
}
KINDS = ("leave out", "double", "swap axis", "rank order", "off by one", "sign", "factor", "bound",
         "axes", "placement")

TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*|R"\((?:.*?)\)"|"(?:\\.|[^"\\])*"'
    r"|'(?:\\.|[^'\\])*'|\d[\d.']*(?:[eE][+-]?\d+)?\w*|[A-Za-z_]\w*"
    r"|\.\.\.|->|::|<=>|<<|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.",
    re.DOTALL | re.MULTILINE)
OPEN, CLOSE = "([{", ")]}"
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&="}
ENDS = {",", ";", "?", ":", "return", "else", "do", "<<"} | ASSIGNMENTS
# A file's text for people, and checks of what users give: mistakes there are of another kind.
SKIPPED_CALLS = {"MOESH_CHECK", "static_assert", "requires", "decltype", "assume", "expect_same",
                 "RECORD_USER_SCOPE"}


@dataclasses.dataclass(frozen=True)
class Token:
    text: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Site:
    """One mistake: the text [begin, end) becomes `changed`."""
    begin: int
    end: int
    changed: str
    kind: str
    function: str
    is_statement: bool
    # What a person reads, and what a reason is keyed by: "a + b -> a - b".
    text: str
    is_constant: bool = False  # the compiler evaluates it: it cannot be chosen at run time


def squeezed(text):
    return " ".join(text.split())


def tokens_of(source):
    found = []
    for m in TOKEN.finditer(source):
        t = m.group()
        if t.isspace() or t.startswith(("//", "/*")) or t.lstrip().startswith("#"):
            continue
        found.append(Token(t, m.start(), m.end()))
    return found


class Source:
    """Tokens, matching brackets, functions, and where code runs at compile time alone."""

    def __init__(self, text):
        self.text = text
        self.tokens = tokens_of(text)
        self.match = {}
        self.outer = {}  # the bracket that each token is in
        stack = []
        for i, t in enumerate(self.tokens):
            self.outer[i] = stack[-1] if stack else -1
            if t.text in OPEN and len(t.text) == 1:
                stack.append(i)
            elif t.text in CLOSE and len(t.text) == 1:
                j = stack.pop()
                self.match[i], self.match[j] = j, i
        self.match_templates()
        self.skipped = set()  # tokens that no mistake touches
        self.functions = []  # (first token of the body, last, name)
        self.find_functions(0, len(self.tokens))
        self.skip_compile_time()

    def at(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def spaced(self, i):
        """Whether white space is on both sides of the token, as around a binary operator."""
        t = self.tokens[i]
        return (self.text[t.begin - 1:t.begin].isspace()
                and self.text[t.end:t.end + 1].isspace())

    def is_word(self, i):
        return re.match(r"[A-Za-z_]", self.at(i)) is not None

    def match_templates(self):
        stack = []
        for i, t in enumerate(self.tokens):
            if t.text == "<" and i and (self.at(i - 1) == "template" or (
                    self.is_word(i - 1) and self.tokens[i - 1].end == t.begin) or
                    self.at(i - 1) == "]" and self.tokens[i - 1].end == t.begin):
                stack.append(i)
            elif t.text == ">" and stack and not (
                    self.spaced(i) and self.at(stack[-1] - 1) != "template"):
                j = stack.pop()
                self.match[i], self.match[j] = j, i
            elif t.text in (";", "{") and stack and self.at(i - 1) not in ("Dense", "Sparse"):
                if t.text == ";":
                    stack.clear()

    def is_template(self, i):
        return self.at(i) in "<>" and i in self.match

    def head_of(self, brace, first):
        """The tokens of a declaration before its {, back to the end of what came before."""
        i = brace - 1
        while i >= first and self.at(i) not in (";", "{", "}"):
            i = self.match[i] if self.at(i) in CLOSE and i in self.match else i
            i -= 1
        # A } of a member's initializer, x_{y}, belongs to the head.
        if i >= first and self.at(i) == "}" and self.at(i + 1) in (",", "{"):
            return self.head_of(self.match[i], first)
        return i + 1

    def name_in(self, first, brace):
        """The name of the function whose declaration is [first, brace), or nothing."""
        i = first
        while i < brace:
            t = self.at(i)
            if t == "=" or t in ("namespace", "class", "struct", "enum", "union"):
                return ""
            if self.is_template(i) and t == "<":
                i = self.match[i]
            elif t in ("operator",):
                j = i + 1
                symbol = ""
                while j < brace and (self.at(j) != "(" or symbol == ""):
                    symbol += self.at(j)
                    j += 1
                return self.qualified(i) + "operator" + symbol
            elif t == "(":
                if self.is_word(i - 1) and self.at(i - 1) not in ("alignas", "requires"):
                    return self.qualified(i - 1) + ("~" if self.at(i - 2) == "~" else
                                                    "") + self.at(i - 1)
                i = self.match[i]
            i += 1
        return ""

    def qualified(self, i):
        return self.at(i - 2) + "::" if self.at(i - 1) == "::" and self.is_word(i - 2) else ""

    def find_functions(self, first, last):
        i = first
        while i < last:
            if self.at(i) == "{":
                head = self.head_of(i, first)
                name = self.name_in(head, i)
                words = [self.at(k) for k in range(head, i)]
                end = self.match[i]
                if name:
                    # The last { of the head is the body: those of initializers come before.
                    while self.at(end + 1) in (",", "{") and "=" not in words:
                        nxt = end + 1
                        while self.at(nxt) != "{":
                            nxt = self.match[nxt] + 1 if self.at(nxt) in OPEN else nxt + 1
                        i, end = nxt, self.match[nxt]
                    self.functions.append((head, end, name))
                elif any(w in ("namespace", "class", "struct") for w in words):
                    self.find_functions(i + 1, end)
                i = end
            i += 1

    def skip(self, first, last):
        self.skipped.update(range(first, last + 1))

    def end_of_statement(self, i):
        while i < len(self.tokens) and self.at(i) != ";":
            i = self.match[i] if self.at(i) in OPEN and i in self.match else i
            if self.at(i) == "}" and self.at(i + 1) != ";" and self.at(i + 1) not in ("(", ","):
                return i
            i += 1
        return i

    def skip_compile_time(self):
        bodies = sorted((b, e) for b, e, _ in self.functions)
        for i in range(len(self.tokens)):
            t = self.at(i)
            if t in SKIPPED_CALLS and self.at(i + 1) in "(<":
                k = i + 1
                if self.is_template(k):
                    k = self.match[k]
                    self.skip(i, k)
                    if t == "assume":
                        continue
                    k += 1
                if self.at(k) == "(" and t != "assume":
                    self.skip(i, self.match[k])
            elif t == "throw" or t == "using" or t == "case":
                k = i
                while self.at(k) not in (";", ":"):
                    k += 1
                self.skip(i, k)
            elif t == "template":
                if self.is_template(i + 1):
                    self.skip(i, self.match[i + 1])
            elif t == "constexpr":
                if self.at(i - 1) == "if":
                    self.skip(i, self.match[i + 1])
                elif not any(b <= i <= e and self.at(self.body_of(b)) == "{" and
                             i < self.body_of(b) for b, e in bodies):
                    self.skip(i, self.end_of_statement(i))
        # Outside of functions: defaults of members and of parameters stay as they are.
        inside = set()
        for b, e, _ in self.functions:
            inside.update(range(b, e + 1))
        self.skipped.update(set(range(len(self.tokens))) - inside)
        for b, e, _ in self.functions:  # the parameters and the result
            first = b
            while self.at(first) != "(" or not self.is_parameters(first):
                first += 1
                if first > e:
                    break
            else:
                self.skip(b, self.match[first])
        for i in range(len(self.tokens)):  # the parameters of lambdas
            if self.at(i) == "]" and self.at(i + 1) == "(" and self.at(self.match[i] - 1) not in (
                    "operator",) and not self.is_word(self.match[i] - 1):
                self.skip(i + 1, self.match[i + 1])

    def body_of(self, head):
        for b, e, _ in self.functions:
            if b == head:
                i = b
                while not (self.at(i) == "{" and self.match[i] == e):
                    i += 1
                return i
        return head

    def is_parameters(self, i):
        return not (self.at(i - 1) == "operator" and self.at(i + 1) == ")")

    def function_at(self, i):
        for b, e, name in self.functions:
            if b <= i <= e:
                return name
        return ""

    def span(self, first, last):
        return self.text[self.tokens[first].begin:self.tokens[last].end]


def segments(s):
    """Runs of tokens at one depth that form an expression: (first, last), inclusive."""
    found = []

    def walk(first, last):
        begin = first
        i = first
        while i <= last:
            t = s.at(i)
            if t in ENDS or t in CLOSE:
                if begin < i:
                    found.append((begin, i - 1))
                begin = i + 1
            elif (t in OPEN or (t == "<" and s.is_template(i))) and i in s.match:
                end = s.match[i]
                if t != "<":
                    walk(i + 1, end - 1)
                is_block = t == "{" and not (
                    s.is_word(i - 1) and s.at(i - 1) not in ("const", "override", "else", "try",
                                                             "mutable", "noexcept", "do")
                    or s.at(i - 1) in (">", ",", "(", "=", "return", "{", "?", ":"))
                if is_block:
                    begin = end + 1
                i = end
            i += 1
        if begin <= last:
            found.append((begin, last))

    walk(0, len(s.tokens) - 1)
    return [f for f in found if not any(k in s.skipped for k in range(f[0], f[1] + 1)
                                        if k in (f[0], f[1]))]


HEADS = {"if", "for", "while", "switch", "catch"}
NOT_VALUES = {"const", "auto", "static", "class", "struct", "else", "switch", "case", "default",
              "try", "public", "private", "break", "continue", "delete", "new", "using"}


def replaced(s, first, last, i, text, through=None):
    """The span with token i (through `through`) replaced."""
    a, b = s.tokens[i].begin, s.tokens[through if through is not None else i].end
    return s.text[s.tokens[first].begin:a] + text + s.text[b:s.tokens[last].end]


def chain_start(s, i):
    """The first token of the postfix expression which ends in the name at i: a.b(c)->name."""
    while True:
        p = s.at(i - 1)
        if p in ("::", ".", "->"):
            i -= 2
            while s.at(i) in CLOSE or (s.at(i) == ">" and s.is_template(i)):
                i = s.match[i] - 1
            if not s.is_word(i):
                return i + 1
        else:
            return i


def arguments(s, paren):
    """(first, last) of each argument of the call whose ( is here."""
    end = s.match[paren]
    found, begin, i = [], paren + 1, paren + 1
    while i < end:
        if s.at(i) in OPEN or (s.at(i) == "<" and s.is_template(i)):
            i = s.match[i]
        elif s.at(i) == ",":
            found.append((begin, i - 1))
            begin = i + 1
        i += 1
    if begin < end:
        found.append((begin, end - 1))
    return found


def call_sites(s):
    for i in range(len(s.tokens)):
        if i in s.skipped or not s.is_word(i):
            continue
        name = s.at(i)
        k = i + 1
        if s.is_template(k) and s.at(k) == "<":
            k = s.match[k] + 1
        if s.at(k) != "(" or k in s.skipped:
            continue
        first, last = chain_start(s, i), s.match[k]
        if s.is_word(first - 1) and s.at(first - 1) not in ("return", "else"):
            continue  # a declaration
        if s.at(i - 1) == "::" and s.at(i - 2) == "std":
            continue
        args = arguments(s, k)
        whole = s.span(first, last)
        if name == "run" and not s.span(*args[0]).startswith("Step::") if args else False:
            continue
        if name in CALLS and len(args) > CALLS[name]:
            a, b = args[CALLS[name]]
            yield first, last, s.span(a, b), "leave out", f"{squeezed(whole)} left out"
            yield first, last, replaced(s, first, last, a, f"{whole}", b), "double", (
                f"{squeezed(whole)} twice")
            if name == "scale" and len(args) == 2:
                a, b = args[1]
                yield first, last, replaced(s, first, last, a, f"2.0 * ({s.span(a, b)})", b), (
                    "factor"), f"{squeezed(whole)} with twice the factor"
        if name == "coordinate" and args:
            sized = replaced(s, first, last, i, "size").replace("rank, ", "").replace("r, ", "")
            yield first, last, f"({sized} - 1 - {whole})", "rank order", (
                f"{squeezed(whole)} counted from the end")
        if name == "rank" and not args and s.at(i - 1) in (".", "->"):
            number = "shape().num_ranks" if "mesh" in s.at(first) else "size"
            yield first, last, f"({replaced(s, first, last, i, number)} - 1 - {whole})", (
                "rank order"), f"{squeezed(whole)} counted from the end"
        if name in INDICES and s.at(i - 1) != "::":
            yield first, last, f"({whole} + 1)", "off by one", f"{squeezed(whole)} + 1"


def min_max_sites(s):
    for i in range(len(s.tokens) - 3):
        if s.at(i) == "std" and s.at(i + 2) in ("min", "max") and i not in s.skipped:
            k = i + 3
            if s.is_template(k):
                k = s.match[k] + 1
            if s.at(k) != "(":
                continue
            last = s.match[k]
            other = "max" if s.at(i + 2) == "min" else "min"
            yield i, last, replaced(s, i, last, i + 2, other), "bound", (
                f"{squeezed(s.span(i, last))} -> {other}")


def word_sites(s, segment):
    """Axes, twins, placements and numbers within a segment, at its own depth or in <...>."""
    first, last = segment
    i = first
    while i <= last:
        if s.at(i) in OPEN:
            i = s.match[i] + 1
            continue
        t = s.at(i)
        if i in s.skipped:
            i += 1
            continue
        is_member = s.at(i - 1) in (".", "->")
        is_name = is_member and first == i - 1  # .tp = 2
        if t in AXES and not is_name and s.at(i + 1) not in ("(", "{", "::") and s.at(
                i - 1) != "::" or t in AXES and s.at(i - 2) == "Axes":
            for other in AXES[t] if not is_member else AXES[t][:1]:
                yield i, other, "swap axis"
        elif t in TWINS and not is_name and s.at(i + 1) not in ("(", "{"):
            yield i, TWINS[t], "rank order"
        elif re.fullmatch(r"\d+", t):
            yield i, "1" if t == "0" else str(int(t) - 1), "off by one"
        i += 1


def around(s, segment):
    """The tokens that show a person where a short text is: the call or list that it is in."""
    first, last = segment
    if s.tokens[last].end - s.tokens[first].begin > 16:
        return first, last
    i = first - 1
    while i > 0 and s.at(i) not in OPEN:
        if s.at(i) in (";", "}", "return"):
            return i + 1, last
        i = s.match[i] - 1 if i in s.match and s.at(i) in CLOSE else i - 1
    if i <= 0 or s.match[i] - i > 60:
        return first, last
    if s.at(i) == "{" and any(s.at(k) == ";" for k in range(i, s.match[i])):  # a block
        return i + 1, last
    k = i - 1
    if s.at(k) == ">" and s.is_template(k):
        k = s.match[k] - 1
    return chain_start(s, k) if s.is_word(k) else i, s.match[i]


def operator_sites(s, segment):
    first, last = segment
    i = first
    while i <= last:
        if s.at(i) in OPEN or (s.at(i) == "<" and s.is_template(i)):
            i = s.match[i] + 1
            continue
        t = s.at(i)
        if t in OTHER and i > first and i < last and s.spaced(i) and not s.is_template(i) and (
                t != "+" or '"' not in s.span(first, last)):  # texts are put together
            kind, other = OTHER[t]
            yield i, other, kind
        i += 1


def placement_sites(s):
    """In the tables of moesh/types: one letter or one step for another."""
    steps = ["identity", "all_gather", "reduce_scatter", "all_reduce", "keep", "pad"]
    for i in range(len(s.tokens)):
        if i in s.skipped or s.at(i + 1) in ("(", "{"):
            continue
        t = s.at(i)
        if t in PLACES and s.at(i - 1) in ("::", "==", "!=", "return", "?", ":") or (
                t in PLACES and s.at(i - 1) == "("):
            a = i - 2 if s.at(i - 1) == "::" else i
            if s.at(a - 1) in ("==", "!=", "return", "?", ":") or s.at(i + 1) in (")", ";", ":"):
                for other in PLACES[t]:
                    yield a, i, (s.at(a) + "::" if a != i else "") + other
        elif t in steps and (s.at(i - 1) == "::" and s.at(i - 2) == "Step" or
                             s.at(i - 1) == "=="):
            a = i - 2 if s.at(i - 1) == "::" else i
            other = steps[(steps.index(t) + 1) % len(steps)]
            yield a, i, (s.at(a) + "::" if a != i else "") + other


def constant_sites(s):
    """Neighbours in a short list of axes, constexpr Axes kOrder[] = {...}: the wrong order."""
    for i in range(len(s.tokens)):
        if s.at(i) == "Axes" and s.at(i - 1) == "constexpr" and s.at(i + 2) == "[":
            brace = s.match[i + 2] + 2
            items = arguments(s, brace) if s.at(brace) == "{" else []
            if len(items) <= 8:
                for (a, b), (c, d) in zip(items, items[1:]):
                    yield s.at(i + 1), a, d, f"{s.span(c, d)}, {s.span(a, b)}"


def statement_sites(s):
    """Statements that can be left out: calls and assignments for their effect."""
    for i in range(len(s.tokens)):
        if i in s.skipped or not s.is_word(i) or s.at(i) in NOT_VALUES | HEADS | {"return"}:
            continue
        if s.at(s.outer[i]) == "(":  # in the head of a for
            continue
        p = s.at(i - 1)
        if p == ")":
            if s.at(s.match[i - 1] - 1) not in HEADS:
                continue
        elif p not in (";", "{", "}", "else"):
            continue
        if p == "{" and s.at(i - 2) in (",", "(", "=", "return", "{") or (
                p == "{" and s.is_word(i - 2) and s.at(i - 2) not in ("const", "override", "else")):
            continue
        end = i
        while end < len(s.tokens) and s.at(end) != ";":
            end = s.match[end] + 1 if s.at(end) in OPEN else end + 1
            if end < len(s.tokens) and s.at(end) in CLOSE:
                break
        if s.at(end) != ";":
            continue
        # A declaration has two words in a row, or a word after >, & or *.
        k, is_declaration, has_effect = i, False, False
        while k < end:
            if s.at(k) in OPEN or (s.at(k) == "<" and s.is_template(k)):
                if s.at(k) == "(":
                    has_effect = True
                k = s.match[k]
                if s.is_word(k + 1) or (s.at(k) == ">" and s.at(k + 1) in "&*"):
                    is_declaration = True
            elif s.is_word(k) and (s.is_word(k + 1) or (s.at(k + 1) in "&*" and not s.spaced(
                    k + 1))):
                is_declaration = True
            elif s.at(k) in ("=", "+=", "-=", "|=", "*=", "/="):
                has_effect = True
                break
            k += 1
        if has_effect and not is_declaration:
            yield i, end


def sites_of(text, with_tables=False):
    """Every site of a source, in order. `with_tables`: it holds the tables of placements."""
    s = Source(text)
    found = []

    def add(first, last, changed, kind, note, is_statement=False):
        name = s.function_at(first)
        if name:
            found.append(Site(s.tokens[first].begin, s.tokens[last].end, changed, kind, name,
                              is_statement, squeezed(note)))

    def note_on(segment, i, other):
        shown = around(s, segment)
        return f"{s.span(*shown)} -> {replaced(s, *shown, i, other)}"

    for first, last, changed, kind, note in call_sites(s):
        add(first, last, changed, kind, note)
    for first, last, changed, kind, note in min_max_sites(s):
        add(first, last, changed, kind, note)
    for segment in segments(s):
        if s.at(segment[0]) in NOT_VALUES | HEADS or s.at(segment[0]) == ".":
            continue
        if s.at(segment[1] + 1) in ASSIGNMENTS:  # what is written to
            continue
        for i, other, kind in operator_sites(s, segment):
            if i in s.skipped:
                continue
            if kind == "axes" and not with_tables and not re.search(
                    r"\b(" + "|".join(AXES) + r"|set|axes|seen|large|known|found)\b",
                    s.span(*segment)):
                continue
            add(*segment, replaced(s, *segment, i, other), kind, note_on(segment, i, other))
        for i, other, kind in word_sites(s, segment):
            add(*segment, replaced(s, *segment, i, other), kind, note_on(segment, i, other))
    if with_tables:
        ends = segments(s)
        starts = [a for a, _ in sorted(ends)]
        ordered = sorted(ends)
        for a, b, other in placement_sites(s):
            inner = [g for g in ordered[:bisect.bisect_right(starts, a)] if g[0] <= a and b <= g[1]]
            if inner:
                segment = max(inner, key=lambda g: (g[0], -g[1]))
                changed = replaced(s, *segment, a, other, b)
                add(*segment, changed, "placement", f"{s.span(*segment)} -> {changed}")
    for first, last in statement_sites(s):
        add(first, last, "", "leave out", f"{s.span(first, last)} left out", is_statement=True)
    for name, first, last, changed in constant_sites(s):
        found.append(Site(s.tokens[first].begin, s.tokens[last].end, changed, "rank order", name,
                          False, f"{s.span(first, last)} -> {changed}", is_constant=True))
    unique = {}
    for site in sorted(found, key=lambda f: (f.is_constant, f.begin, -f.end, f.changed)):
        unique.setdefault((site.begin, site.end, squeezed(site.changed)), site)
    return list(unique.values())


def render(text, numbered, header):
    """The source with all mistakes, chosen at run time, and which mistake each line belongs to.

    `numbered` is (number, site). Each mistake has a line of its own, so that a compiler's error
    there is an error of that mistake: line -> number.
    """
    groups = {}
    for number, site in numbered:
        groups.setdefault((site.begin, site.end, site.is_statement), []).append((number, site))
    places = sorted(groups, key=lambda g: (g[0], -g[1], not g[2]), reverse=True)
    out, owners, line = [], {}, [1 + header.count("\n")]

    def put(piece):
        out.append(piece)
        line[0] += piece.count("\n")

    def put_mistake(piece, number):
        put("\n")
        for _ in range(piece.count("\n") + 1):
            owners[line[0] + _] = number
        put(piece + "\n")

    def walk(begin, end):
        while places and places[-1][0] < end:
            b, e, is_statement = places[-1]
            if e > end:
                places.pop()
                for number, _ in groups[(b, e, is_statement)]:
                    dropped.append(number)
                continue
            places.pop()
            put(text[begin:b])
            for n, (number, site) in enumerate(groups[(b, e, is_statement)]):
                chosen = f"::moesh::machine::on({number})"
                if is_statement:
                    put_mistake(f"{{ if ({chosen}) {{ {site.changed} }} else", number)
                else:
                    put_mistake(f"{'(' if n == 0 else ''}{chosen} ? ({site.changed}) :", number)
            if not is_statement:
                put("(")
            walk(b, e)
            put(" }" * len(groups[(b, e, is_statement)]) if is_statement else "))")
            begin = e
        put(text[begin:end])

    dropped = []
    walk(0, len(text))
    return header + "".join(out), owners, dropped
