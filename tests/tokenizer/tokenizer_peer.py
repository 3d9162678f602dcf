#!/usr/bin/env python3
"""Compares moesh's tokenizers with the Python package `tokenizers`, id for id.

    tokenizer_peer.py PROGRAM families    settings of five model families (a part of `all`)
    tokenizer_peer.py PROGRAM steps       every other step that moesh knows, one tokenizer for each
    tokenizer_peer.py PROGRAM decoding    ids back to text
    tokenizer_peer.py PROGRAM spans       which characters each token stands for
    tokenizer_peer.py PROGRAM all         families: 100 MB, a million strings, every code point
    tokenizer_peer.py PROGRAM speed       MB/s of both on one thread

The tokenizers are trained here, on text that is made here; their settings are those which the
families publish.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import unicodedata

import numpy as np

os.environ.setdefault("RAYON_NUM_THREADS", "2")
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # noqa: E402

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
SCRIPTS = [  # letters of words, and what is between words
    ("abcdefghijklmnopqrstuvwxyz", " "),
    ("абвгдежзийклмнопрстуфхцчшщыьэюя", " "),
    ("αβγδεζηθικλμνξοπρστυφχψω", " "),
    ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", " "),
    ("אבגדהוזחטיכלמנסעפצקרשת", " "),
    ("कखगघचछजझटठडढणतथदधनपफबभमयरलवशषसहािीुूेैो्", " "),
    ("กขคงจฉชซดตถทธนบปผพฟภมยรลวศสหอะาิีุูเแโใไ่้", ""),
    ("的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年", ""),
    ("あいうえおかきくけこさしすせそたちつてとなにぬねのアイウエオカキクケコ", ""),
    ("가나다라마바사아자차카타파하한국어는이을를에의도", " "),
    ("aeiouàâäéèêëîïôöùûüçñãõåøæœßłśźżćęąčďěňřšťůž", " "),
]
SPACES = (
    " \t\n\r\v\f\x85\xa0\u1680\u180e\u2000\u2009\u200a\u200b\u200d\u2028\u2029\u202f\u205f\u3000\ufeff"
)
MARKS = (
    "\u0300\u0301\u0308\u0323\u0327\u0334\u0345\u05b0\u064b\u0651\u093c\u0941\u09be"
    "\u09d7\u0e38\u0f71\u0f72\u1100\u1161\u11a8\u302a\u3099"
)


class Text:
    """Text of ten scripts: words that come again as in real text, code, numbers and signs."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.words = [[self.word(letters) for _ in range(3000)] for letters, _ in SCRIPTS]

    def word(self, letters):
        return "".join(
            self.random.choices(letters, k=max(1, int(self.random.gammavariate(4, 1.4))))
        )

    def sentence(self):
        r = self.random
        if r.random() < 0.15:
            return self.code()
        i = r.randrange(len(SCRIPTS))
        words, between = self.words[i], SCRIPTS[i][1]
        chosen = [
            words[min(int(r.paretovariate(0.7)) - 1, len(words) - 1)]
            for _ in range(r.randrange(3, 25))
        ]
        for _ in range(r.randrange(3)):
            at = r.randrange(len(chosen))
            chosen[at] = r.choice(
                [str.title, str.upper, lambda w: w + r.choice(["'s", "'LL", "’t", "'ſ", "s'"])]
            )(chosen[at])
        if r.random() < 0.4:
            chosen.insert(
                r.randrange(len(chosen)),
                r.choice(["%d", "%d.%d", "%05d,%d", "٣%d", "%d²"]).replace(
                    "%d", str(r.randrange(10 ** r.randrange(1, 9)))
                ),
            )
        return between.join(chosen) + r.choice(
            [". ", "! ", "? ", "。", ", ", "...\n", "\n\n", " — ", " 👍🏽 ", "\r\n", "…  "]
        )

    def code(self):
        r = self.random
        name = lambda: "_".join(self.words[0][r.randrange(300)] for _ in range(r.randrange(1, 3)))
        return r.choice(["    ", "\t", "        ", ""]) + r.choice(
            [
                f"def {name()}({name()}, {name()}={r.randrange(1000)}):\n",
                f"{name()} = {name()}[{r.randrange(99)}] + 0x{r.randrange(1 << 20):X};\n",
                f'if ({name()} != "{name()}") {{ return {name()}.{name()}(); }}\n',
                f"// https://{name()}.org/{name()}?q={r.randrange(1000)}\n",
            ]
        )

    def document(self, size=4000):
        parts, length = [], 0
        while length < size:
            parts.append(self.sentence())
            length += len(parts[-1].encode())
        return "".join(parts)

    def documents(self, num_bytes):
        total = 0
        while total < num_bytes:
            total += len(
                (document := self.document(self.random.choice([200, 2000, 8000]))).encode()
            )
            yield document


def random_strings(count, seed, tokens):
    r = random.Random(seed)
    every = [
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x400, 0x530),
        (0x590, 0x700),
        (0x900, 0xE80),
        (0x1100, 0x1200),
        (0x1E00, 0x2070),
        (0x2000, 0x3100),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A4),
        (0xF900, 0xFB50),
        (0x1F300, 0x1FA00),
        (0x10000, 0x20000),
    ]
    some = "abcXYZ019 '\"<>|_-./,s'S\n\r\t▁st▁re"

    def one():
        kind = r.random()
        if kind < 0.3:
            return r.choice(some)
        if kind < 0.45:
            return r.choice(SPACES)
        if kind < 0.6:
            return r.choice(MARKS)
        if kind < 0.65:
            return r.choice(tokens) if tokens else "x"
        if kind < 0.68:
            return r.choice(
                ["'s", "'RE", "'ll", " '", "<|", "|>", "  ", "\n\n", "'ſo", "ß", "ﬁ", "K", "ſ"]
            ) * r.randrange(1, 3)
        if kind < 0.72:
            c = r.randrange(0x110000)
            return chr(c) if not 0xD800 <= c < 0xE000 else "?"
        a, b = r.choice(every)
        return chr(r.randrange(a, b))

    return ["".join(one() for _ in range(r.randrange(0, 24))) for _ in range(count)]


def code_points(step=1):
    """Every code point by itself, and where its neighbours matter."""
    for c in range(0, 0x110000, step):
        if not 0xD800 <= c < 0xE000:
            yield chr(c)
    for c in range(0, 0x110000, 37 * step):
        if not 0xD800 <= c < 0xE000:
            yield f"a{chr(c)}b {chr(c)}{chr(c)}1 {chr(c)}\n"


def trained(name, corpus, trained_with, vocab_size=8000, **options):
    unknown = {"unk_token": options["unk_token"]} if "unk_token" in options else {}
    tokenizer = Tokenizer(models.BPE(**unknown))
    if normalizer := options.get("train_normalizer", options.get("normalizer")):
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = trained_with
    limit = {"limit_alphabet": options["limit_alphabet"]} if "limit_alphabet" in options else {}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=options.get("special_tokens", []),
        show_progress=False,
        initial_alphabet=options.get("alphabet", []),
        **limit,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    parts = json.loads(tokenizer.to_str())
    parts["model"].update(options.get("model", {}))
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    if "train_normalizer" in options and options["normalizer"]:
        tokenizer.normalizer = options["normalizer"]
    for part in ("post_processor", "decoder"):
        if part in options:
            setattr(
                tokenizer,
                part,
                options[part](tokenizer) if callable(options[part]) else options[part],
            )
    if "pre_tokenizer" in options:
        parts = json.loads(tokenizer.to_str())
        parts["pre_tokenizer"] = options["pre_tokenizer"] and json.loads(
            options["pre_tokenizer"].__getstate__()
        )
        tokenizer = Tokenizer.from_str(json.dumps(parts))
    if "added" in options:
        tokenizer.add_tokens(options["added"])
    return name, tokenizer


def byte_level(*patterns, **options):
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return dict(
        pre_tokenizer_=pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        alphabet=pre_tokenizers.ByteLevel.alphabet(),
        decoder=decoders.ByteLevel(),
        **options,
    )


def template(token):
    return lambda t: processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, t.token_to_id(token))],
    )


def make(name, corpus, settings, **more):
    settings = dict(settings, **more)
    return trained(name, corpus, settings.pop("pre_tokenizer_"), **settings)


def mixtral(name, corpus, **more):
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    return trained(
        name,
        corpus,
        pre_tokenizers.Metaspace(),
        vocab_size=6000,
        special_tokens=specials,
        unk_token="<unk>",
        limit_alphabet=300,
        train_normalizer=None,
        **{
            "model": dict(byte_fallback=True, fuse_unk=True),
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            ),
            "pre_tokenizer": None,
            "post_processor": template("<s>"),
            "decoder": decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            ),
            **more,
        },
    )


def without_bytes(tokenizer):
    """Bytes are special when they are trained, but no added tokens in a published file."""
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [t for t in parts["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(parts))


def families(num_bytes=3_000_000):
    corpus = list(Text(1).documents(num_bytes))
    yield make(
        "qwen3_moe",
        corpus,
        byte_level(
            QWEN,
            normalizer=normalizers.NFC(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            post_processor=processors.ByteLevel(trim_offsets=False),
        ),
    )
    yield make(
        "deepseek_v3",
        corpus,
        byte_level(
            *DEEPSEEK,
            normalizer=normalizers.Sequence([]),
            special_tokens=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
            post_processor=template("<｜begin▁of▁sentence｜>"),
        ),
        added=[AddedToken("<｜User｜>", normalized=True), AddedToken("<think>", normalized=True)],
    )
    yield make(
        "gpt_oss",
        corpus,
        byte_level(O200K, special_tokens=["<|startoftext|>", "<|endoftext|>", "<|return|>"]),
        vocab_size=70_000,
    )
    yield make(
        "llama4",
        corpus,
        byte_level(
            O200K,
            model=dict(ignore_merges=True),
            special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
            post_processor=lambda t: processors.Sequence(
                [processors.ByteLevel(trim_offsets=False), template("<|begin_of_text|>")(t)]
            ),
        ),
    )
    name, tokenizer = mixtral("mixtral", corpus)
    yield name, without_bytes(tokenizer)


def shuffled_merges(tokenizer):
    """A vocabulary with words that merges do not reach, for ignore_merges."""
    parts = json.loads(tokenizer.to_str())
    merges = parts["model"]["merges"]
    parts["model"]["merges"] = merges[: len(merges) // 2] + merges[-len(merges) // 4 :]
    return Tokenizer.from_str(json.dumps(parts))


def steps():
    corpus = list(Text(2).documents(120_000))
    yield make(
        "gpt2",
        corpus,
        byte_level(),
        vocab_size=2000,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    )
    yield make("cl100k", corpus, byte_level(CL100K), vocab_size=2000)
    name, tokenizer = make(
        "ignore_merges", corpus, byte_level(QWEN, model=dict(ignore_merges=True)), vocab_size=3000
    )
    yield name, shuffled_merges(tokenizer)
    for individual in (False, True):
        digits = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        yield make(
            f"digits_{individual}", corpus, byte_level(), vocab_size=1000, pre_tokenizer=digits
        )
    for behavior in (
        "removed",
        "isolated",
        "merged_with_previous",
        "merged_with_next",
        "contiguous",
    ):
        for invert in (False, True):
            split = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"[\s'.]|ab"), behavior, invert),
                    pre_tokenizers.Punctuation(behavior),
                    pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
                ]
            )
            yield make(
                f"split_{behavior}_{invert}",
                corpus,
                byte_level(),
                vocab_size=1000,
                pre_tokenizer=split,
            )
    for kind in ("Whitespace", "WhitespaceSplit"):
        yield trained(
            kind.lower(),
            corpus,
            getattr(pre_tokenizers, kind)(),
            vocab_size=2000,
            unk_token="<unk>",
            special_tokens=["<unk>"],
            limit_alphabet=150,
        )
    for scheme in ("always", "first", "never"):
        for split in (False, True):
            name, tokenizer = mixtral(
                f"metaspace_{scheme}_{split}",
                corpus,
                normalizer=None,
                pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split),
                decoder=decoders.Metaspace(prepend_scheme=scheme),
            )
            yield name, without_bytes(tokenizer)
    name, tokenizer = mixtral(
        "unknown_fused", corpus, model=dict(byte_fallback=False, fuse_unk=True)
    )
    yield name, without_bytes(tokenizer)
    name, tokenizer = mixtral(
        "unknown_single", corpus, model=dict(byte_fallback=False, fuse_unk=False)
    )
    yield name, without_bytes(tokenizer)
    parts = json.loads(tokenizer.to_str())
    parts["model"]["byte_fallback"] = True
    parts["added_tokens"] = parts["added_tokens"][:3]
    for b in range(0xE0, 0xF0):
        del parts["model"]["vocab"][f"<0x{b:02X}>"]
    yield "some_bytes", Tokenizer.from_str(json.dumps(parts))
    parts["model"]["unk_token"] = None
    yield "no_unknown", Tokenizer.from_str(json.dumps(parts))
    yield make("nfd", corpus, byte_level(QWEN, normalizer=normalizers.NFD()), vocab_size=1000)
    replace = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.NFC(),
            normalizers.Replace("ab", "c"),
            normalizers.Prepend("x "),
        ]
    )
    yield make("replace", corpus, byte_level(QWEN, normalizer=replace), vocab_size=1000)
    flags = [
        AddedToken(
            f"[{name}]", **{key: True for key in keys}, normalized=normalized, special=normalized
        )
        for normalized in (False, True)
        for name, keys in (
            (f"L{normalized}", ["lstrip"]),
            (f"R{normalized}", ["rstrip"]),
            (f"LR{normalized}", ["lstrip", "rstrip"]),
            (f"W{normalized}", ["single_word"]),
            (f"N{normalized}", []),
        )
    ]
    flags += [
        AddedToken(" ab", normalized=False, lstrip=True),
        AddedToken("abc", single_word=True, rstrip=True),
        AddedToken("é", normalized=True),
    ]
    yield make(
        "added",
        corpus,
        byte_level(QWEN, normalizer=normalizers.NFD()),
        vocab_size=1000,
        added=flags,
    )
    yield make(
        "added_prefix",
        corpus,
        byte_level(normalizer=normalizers.Prepend("▁")),
        vocab_size=1000,
        added=flags,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    )


def records(items, dtype=None):
    parts = []
    for item in items:
        data = item.encode() if dtype is None else np.asarray(item, dtype).tobytes()
        parts += [np.uint32(len(data) // (1 if dtype is None else 4)).tobytes(), data]
    return b"".join(parts)


class Peer:
    def __init__(self, program, folder):
        self.program, self.folder = program, pathlib.Path(folder)

    def run(self, tokenizer, what, data, size):
        """What moesh makes of records, each of items of so many bytes; and its seconds."""
        file, given, made = (self.folder / name for name in ("tokenizer.json", "input", "output"))
        file.write_text(tokenizer.to_str())
        given.write_bytes(data)
        done = subprocess.run(
            [self.program, file, what, given, made], capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{what}: {done.stderr}")
        out, results, at = made.read_bytes(), [], 0
        while at < len(out):
            end = at + 4 + int.from_bytes(out[at : at + 4], "little") * size
            results.append(out[at + 4 : end])
            at = end
        return results, float(done.stdout or 0)


def reference(tokenizer, texts, with_template=True):
    per_batch = 20_000 if len(texts[0]) < 100 else 500  # encodings are large
    for start in range(0, len(texts), per_batch):
        batch = texts[start : start + per_batch]
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=with_template):
            yield encoding.ids


def compare(peer, name, tokenizer, what, texts, with_template=True):
    found, _ = peer.run(tokenizer, "encode" if with_template else "plain", records(texts), 4)
    num_ids = 0
    if len(found) != len(texts):
        sys.exit(f"{name}: {len(texts)} texts and {len(found)} results")
    for text, ids, expected in zip(texts, found, reference(tokenizer, texts, with_template)):
        num_ids += len(expected)
        if ids != np.asarray(expected, np.int32).tobytes():
            sys.exit(
                f"{name}: {what}: {text[:200]!r} ...: moesh gives "
                f"{np.frombuffer(ids, np.int32)[:60].tolist()}, the package {expected[:60]}"
            )
    print(
        f"{name}: {what}: {len(texts)} texts, {sum(len(t.encode()) for t in texts)} bytes, "
        f"{num_ids} ids are equal",
        flush=True,
    )


def special(tokenizers):
    return sorted(
        {
            t.content
            for _, tokenizer in tokenizers
            for t in tokenizer.get_added_tokens_decoder().values()
        }
    )


def compare_all(peer, all_tokenizers, num_bytes, num_strings, code_point_step):
    all_tokenizers = list(all_tokenizers)
    documents = list(Text(3).documents(num_bytes))
    strings = random_strings(num_strings, 4, special(all_tokenizers))
    singles = list(code_points(code_point_step))
    for name, tokenizer in all_tokenizers:
        compare(peer, name, tokenizer, "mixed text", documents)
        compare(peer, name, tokenizer, "random strings", strings)
        compare(peer, name, tokenizer, "code points", singles)
        compare(peer, name, tokenizer, "without template", documents[:20], with_template=False)


def compare_decoding(peer, all_tokenizers):
    r = random.Random(5)
    all_tokenizers = list(all_tokenizers)
    texts = list(Text(6).documents(30_000)) + random_strings(1000, 7, special(all_tokenizers))
    for name, tokenizer in all_tokenizers:
        lists = [e.ids for e in tokenizer.encode_batch_fast(texts)]
        lists += [
            [r.randrange(tokenizer.get_vocab_size() + 3) for _ in range(r.randrange(1, 30))]
            for _ in range(1000)
        ]
        for what, skip in (("decode", False), ("skip", True)):
            found, _ = peer.run(tokenizer, what, records(lists, np.int32), 1)
            for ids, text in zip(lists, found):
                if (expected := tokenizer.decode(ids, skip_special_tokens=skip)) != text.decode():
                    sys.exit(
                        f"{name}: {what} of {ids[:50]}: moesh gives {text.decode()[:200]!r}, "
                        f"the package {expected[:200]!r}"
                    )
        print(f"{name}: {len(lists)} lists of ids decode to equal texts", flush=True)


def compare_spans(peer, all_tokenizers):
    """The offsets of the package. To a character that was put together from several, by NFC or by
    the replacement of a pattern, it gives one of them, and moesh all."""
    all_tokenizers = list(all_tokenizers)
    texts = list(Text(9).documents(30_000)) + random_strings(3000, 10, special(all_tokenizers))
    for name, tokenizer in all_tokenizers:
        tokenizer.no_padding()
        found, _ = peer.run(tokenizer, "spans", records(texts), 4)
        num_exact = num_tokens = 0
        forms = [form for form in ("NFC", "NFD") if form in tokenizer.to_str()]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, numbers, expected in zip(texts, found, encodings):
            ids, begins, ends = np.frombuffer(numbers, np.uint32).reshape(-1, 3).T.tolist()
            assert ids == expected.ids, (name, text)
            place = {len(text[:i].encode()): i for i in range(len(text) + 1)}
            spans = [(place[b], place[e]) for b, e in zip(begins, ends)]
            num_tokens += len(spans)
            if name != "replace" and all(unicodedata.is_normalized(f, text) for f in forms):
                num_exact += len(spans)
                if spans != expected.offsets:
                    sys.exit(f"{name}: spans of {text[:200]!r} ...: moesh gives {spans[:40]}, the "
                             f"package {expected.offsets[:40]}")
                continue
            wrong = [(ours, theirs) for ours, theirs in zip(spans, expected.offsets)
                     if theirs[0] < theirs[1] and not ours[0] <= theirs[0] < theirs[1] <= ours[1]]
            if wrong:
                sys.exit(f"{name}: spans of {text!r}: moesh has {wrong[0][0]}, the package "
                         f"{wrong[0][1]}")
        print(f"{name}: spans of {num_tokens} tokens, {num_exact} equal to the package's",
              flush=True)


def speed(peer):
    documents = list(Text(8).documents(20_000_000))
    megabytes = sum(len(d.encode()) for d in documents) / 1e6
    data = records(documents)
    print(f"{megabytes:.1f} MB of text in {len(documents)} documents, one thread; best of three")
    print(f"{'tokenizer':12} {'moesh MB/s':>11} {'tokenizers MB/s':>16} {'ratio':>6}")
    slower = []
    for name, tokenizer in families():
        ours = theirs = float("inf")
        for _ in range(3):
            found, seconds = peer.run(tokenizer, "encode", data, 4)
            ours = min(ours, seconds)
            start = time.perf_counter()
            encodings = tokenizer.encode_batch_fast(documents)
            theirs = min(theirs, time.perf_counter() - start)
        if any(np.asarray(e.ids, np.int32).tobytes() != ids for e, ids in zip(encodings, found)):
            sys.exit(f"{name}: ids differ")
        print(
            f"{name:12} {megabytes / ours:11.1f} {megabytes / theirs:16.1f} {theirs / ours:6.1f}",
            flush=True,
        )
        slower += [name] if ours > theirs else []
    if slower:
        sys.exit(f"slower than the package: {', '.join(slower)}")


def main():
    program, what = sys.argv[1:]
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        peer = Peer(program, folder)
        if what == "families":
            compare_all(peer, families(1_000_000), 300_000, 4_000, 23)
        elif what == "steps":
            compare_all(peer, steps(), 30_000, 2_000, 211)
        elif what == "decoding":
            compare_decoding(peer, [*families(100_000), *steps()])
        elif what == "spans":
            compare_spans(peer, [*families(100_000), *steps()])
        elif what == "all":
            compare_all(peer, families(), 100_000_000, 1_000_000, 1)
        elif what == "speed":
            speed(peer)
        else:
            sys.exit(__doc__)


if __name__ == "__main__":
    if sys.argv[2:] == ["speed"] and os.environ.get("RAYON_NUM_THREADS") != "1":
        os.execvpe(
            sys.executable, [sys.executable, *sys.argv], dict(os.environ, RAYON_NUM_THREADS="1")
        )
    main()
