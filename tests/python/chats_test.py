#!/usr/bin/env python3
"""Chats as tokens and masks: chats_test.py [COUNT].

`against_transformers` compares ids and masks with `apply_chat_template`, for templates of the five
model families: those that TRL ships (for Qwen3, DeepSeek-V3, GPT-OSS and Llama 3), and for Mixtral
and Llama 4 templates of the same form that are written here. COUNT conversations of each are made.
"""

import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tokenizer"))
os.environ["HF_HUB_OFFLINE"] = "1"
import moesh  # noqa: E402
import numpy as np  # noqa: E402
import tokenizer_peer as peer  # noqa: E402
from tokenizers import AddedToken  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

MIXTRAL = """{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set has_system = turns | length < messages | length %}
        {%- set said = messages[0].content + '\\n\\n' if loop.first and has_system else '' %}
        {{- ' [INST] ' + said + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""
LLAMA4 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content | trim }}
            {%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
            {{- '<|eot|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""
WITHOUT_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")

DEEPSEEK = ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
            "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>", "<think>"]
QWEN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
GPT_OSS = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>",
           "<|message|>", "<|call|>"]
LLAMA = ["<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>",
         "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer_of(family, corpus):
    """A small tokenizer with the steps and the special tokens of a family; its bos and its eos."""
    plain = [AddedToken(token, normalized=False) for token in (*DEEPSEEK, *QWEN)]
    if family == "mixtral":
        return peer.without_bytes(peer.mixtral(family, corpus)[1]), "<s>", "</s>"
    if family == "qwen3":
        settings = peer.byte_level(peer.QWEN, normalizer=peer.normalizers.NFC(),
                                   special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        tokenizer = peer.make(family, corpus, settings, vocab_size=1500, added=plain)[1]
        return tokenizer, None, "<|im_end|>"
    if family == "deepseek_v3":
        ends = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
        settings = peer.byte_level(*peer.DEEPSEEK, special_tokens=ends)
        return peer.make(family, corpus, settings, vocab_size=1500, added=plain)[1], *ends
    specials = GPT_OSS if family == "gpt_oss" else LLAMA
    settings = peer.byte_level(peer.O200K, special_tokens=specials)
    tokenizer = peer.make(family, corpus, settings, vocab_size=1500)[1]
    return tokenizer, specials[0], "<|return|>" if family == "gpt_oss" else "<|eot|>"


def trl_template(name):
    folder = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


# Family, template, and for one without {% generation %} what is trained on, by its form.
TEMPLATES = {
    "qwen3_training": ("qwen3", lambda: trl_template("qwen3_training"), None),
    "qwen3": ("qwen3", lambda: trl_template("qwen3"),
              r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"),
    "deepseek_v3_training": ("deepseek_v3", lambda: trl_template("deepseekv3_training"), None),
    "deepseek_v3": ("deepseek_v3", lambda: trl_template("deepseekv3"),
                    "(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)"),
    "gpt_oss_training": ("gpt_oss", lambda: trl_template("gptoss_training"), None),
    "gpt_oss": ("gpt_oss", lambda: trl_template("gptoss"),
                r"<\|start\|>assistant(.*?(?=<\|start\|>(?:user|functions))|.*$)"),
    "llama3_training": ("llama4", lambda: trl_template("llama3_training"), None),
    "llama3": ("llama4", lambda: trl_template("llama3"),
               r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"),
    "llama4_marked": ("llama4", lambda: LLAMA4, None),
    "llama4": ("llama4", lambda: WITHOUT_MARKS.sub("", LLAMA4),
               r"<\|header_start\|>assistant<\|header_end\|>\n\n(.*?<\|eot\|>)"),
    "mixtral_marked": ("mixtral", lambda: MIXTRAL, None),
    "mixtral": ("mixtral", lambda: WITHOUT_MARKS.sub("", MIXTRAL), r"\[/INST\](.*?</s>)"),
}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "what it is like <outside> & more",
    "parameters": {"type": "object", "required": ["city"],
                   "properties": {"city": {"type": "string", "description": "which"},
                                  "days": {"type": "integer"}}}}}]


# NFC changes how each answer begins, and not the newline of the header before it.
ODD = {"messages": [{"role": role, "content": content} for begin in (
    "\u0301\u0323", "\u0344", "\u212b", "e\u0301", "\u1100\u1161", "plain")
    for role, content in (("user", "a"), ("assistant", f"{begin} b"))]}


class Chats:
    """Conversations that a template takes: tools, system, many turns, nothing said, any script."""

    def __init__(self, name, seed):
        self.name, self.random, self.text = name, random.Random(seed), peer.Text(seed)
        self.strings = peer.random_strings(200, seed, [])

    def said(self, may_be_empty=True):
        r = self.random
        kind = r.random()
        if kind < 0.1 and may_be_empty:
            return ""
        if kind < 0.2:
            before, behind = r.choice(["", " ", "\n", "\n\n"]), r.choice(["", " ", "\n"])
            return before + r.choice(self.strings) + behind
        if kind < 0.22:
            return self.text.document(30_000)
        return self.text.document(r.choice([10, 50, 200, 1000]))

    def call(self):
        arguments = {"city": self.said(may_be_empty=False)[:30], "days": self.random.randrange(9)}
        if self.name == "deepseek_v3":  # its template takes a string
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {"type": "function", "function": {"name": "weather", "arguments": arguments}}

    def answer(self):
        message = {"role": "assistant", "content": self.said()}
        if self.name.startswith(("qwen3", "gpt_oss")) and self.random.random() < 0.4:
            message["thinking" if "gpt" in self.name else "reasoning_content"] = self.said()
        return message

    def one(self):
        r = self.random
        family = TEMPLATES[self.name][0]
        messages = [{"role": "system", "content": self.said()}] if r.random() < 0.4 else []
        has_tools = family in ("qwen3", "gpt_oss", "deepseek_v3") or self.name.startswith("llama4")
        has_tools = has_tools and r.random() < 0.4
        for _ in range(r.choice([1, 1, 2, 3, 12 if r.random() < 0.2 else 4])):
            messages.append({"role": "user", "content": self.said()})
            if has_tools and r.random() < 0.6:
                # The second call has no <｜Assistant｜> in this template: moesh refuses it.
                num_rounds = r.choice([1, 1, 2]) if self.name != "deepseek_v3" else int(
                    not any("tool_calls" in message for message in messages))
                for _ in range(num_rounds):
                    asks = {"role": "assistant", "content": "", "tool_calls": [self.call()]}
                    if "gpt_oss" in self.name and r.random() < 0.5:
                        asks["thinking"] = self.said(may_be_empty=False)
                    elif family == "qwen3" and r.random() < 0.5:
                        asks["content"] = self.said()
                        if r.random() < 0.5:
                            asks["reasoning_content"] = self.said()
                    elif family == "deepseek_v3":
                        asks["content"] = r.choice([None, self.said()])
                    if "gpt_oss" not in self.name and r.random() < 0.3:
                        asks["tool_calls"].append(self.call())
                    messages.append(asks)
                    for _ in asks["tool_calls"]:
                        messages.append({"role": "tool", "content": self.said()})
            messages.append(self.answer())
        return {"messages": messages, **({"tools": TOOLS} if has_tools else {})}


def write_folder(folder, tokenizer, template, bos, eos):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {"bos_token": bos and {"content": bos}, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_lines(path, objects):
    path.write_text("".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects),
                    encoding="utf-8")
    return path


def documents(prefix):
    """Ids and mask of every document."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    dtype = {8: np.uint16, 4: np.int32}[index[17]]
    count = int.from_bytes(index[18:26], "little")
    lengths = np.frombuffer(index, np.int32, count, 34)
    ends = np.cumsum(lengths)
    ids, mask = np.fromfile(f"{prefix}.bin", dtype), np.fromfile(f"{prefix}.mask", np.uint8)
    assert len(ids) == len(mask) == ends[-1]
    return [(ids[e - n:e].tolist(), mask[e - n:e].tolist()) for e, n in zip(ends, lengths)]


def expected(reference, template, chat, form):
    """Ids and mask that transformers gives, or those of what the form says."""
    options = dict(tools=chat.get("tools"), chat_template=template, return_dict=True)
    out = reference.apply_chat_template(chat["messages"], return_assistant_tokens_mask=form is None,
                                        **options)
    if form is None:
        return out["input_ids"], out["assistant_masks"], 0
    text = reference.apply_chat_template(chat["messages"], tokenize=False, **options)
    encoding = reference(text, add_special_tokens=False)
    assert encoding["input_ids"] == out["input_ids"]
    mask = [0] * len(out["input_ids"])
    parts = list(re.finditer(form, text, re.S))
    for part in parts:
        begin, end = part.span(1)
        for i in range(encoding.char_to_token(begin), encoding.char_to_token(end - 1) + 1):
            mask[i] = 1
    return out["input_ids"], mask, len(parts)


def compare(tmp, name, tokenizer, bos, eos, count):
    family, template, form = TEMPLATES[name]
    template = template()
    folder = write_folder(tmp / name, tokenizer, template, bos, eos)
    special = {key: value for key, value in (("bos_token", bos), ("eos_token", eos)) if value}
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    made = Chats(name, seed=len(name))
    chats = [made.one() for _ in range(count)] + [ODD]
    lines = write_lines(folder / "chats.jsonl", chats)
    counts = moesh.tokenize(lines, tokenizer=folder, out=folder / "chats")
    found = documents(folder / "chats")
    assert len(found) == len(chats) and counts["without_trained_tokens"] == 0, counts
    num_trained = 0
    for number, (chat, (ids, mask)) in enumerate(zip(chats, found)):
        want_ids, want_mask, num_parts = expected(reference, template, chat, form)
        turns = sum(m["role"] == "assistant" for m in chat["messages"])
        assert form is None or num_parts == turns, (name, number, num_parts, turns)
        assert ids == want_ids, f"{name}: conversation {number}: {chat}"
        if mask != want_mask:
            at = next(i for i, (a, b) in enumerate(zip(mask, want_mask)) if a != b)
            raise AssertionError(
                f"{name}: the mask of conversation {number} is {mask[at]}, not {want_mask[at]}, at "
                f"token {at}: {reference.decode(ids[max(0, at - 20):at])!r} | "
                f"{reference.decode(ids[at:at + 10])!r}; {chat}")
        num_trained += sum(mask)
    assert num_trained == counts["trained_tokens"]
    print(f"{name}: {len(chats)} conversations, {sum(len(ids) for ids, _ in found)} ids and masks "
          f"are equal, {num_trained} trained", flush=True)


def against_transformers(tmp, count="12"):
    corpus = list(peer.Text(1).documents(60_000))
    tokenizers = {family: tokenizer_of(family, corpus)
                  for family in sorted({family for family, _, _ in TEMPLATES.values()})}
    for name, (family, _, _) in TEMPLATES.items():
        compare(tmp, name, *tokenizers[family], int(count))


def small_folder(tmp, template=LLAMA4):
    corpus = list(peer.Text(1).documents(20_000))
    tokenizer, bos, eos = tokenizer_of("llama4", corpus)
    return write_folder(tmp / "model", tokenizer, template, bos, eos)


def trained_texts(folder, prefix):
    """Of each document, its text with [ and ] around what is trained on."""
    tokenizer = peer.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for ids, mask in documents(prefix):
        text, begin = "", 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or mask[i] != mask[begin]:
                part = tokenizer.decode(ids[begin:i], skip_special_tokens=False)
                text += f"[{part}]" if mask[begin] else part
                begin = i
        texts.append(text)
    return texts


def formats(tmp):
    """The formats say the same conversation; fields have other names, roles are chosen."""
    folder = small_folder(tmp)
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    as_messages = [{"role": r, "content": c} for r, c in turns]
    same = {
        "messages": {"messages": as_messages},
        "prompt_completion": {"prompt": as_messages[:3], "completion": as_messages[3:]},
        "sharegpt": {"conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in turns]},
        "alpaca": {"instruction": "Bye", "input": "", "output": "See you",
                   "history": [["Hi", "Hello"]]},
    }
    head = "<|header_start|>{}<|header_end|>\n\n"
    user, assistant = head.format("user"), head.format("assistant")
    one = f"<|begin_of_text|>{user}Hi<|eot|>{assistant}"
    both = f"{one}[Hello<|eot|>]{user}Bye<|eot|>{assistant}[See you<|eot|>]"
    for name, line in same.items():
        path = write_lines(tmp / f"{name}.jsonl", [line])
        for chosen in ("auto", name):
            out = tmp / f"{name}-{chosen}"
            moesh.tokenize([path], tokenizer=folder, out=out, chats=chosen)
            want = both.replace("[Hello<|eot|>]", "Hello<|eot|>") if "prompt" in name else both
            assert trained_texts(folder, out) == [want], (name, trained_texts(folder, out))
    renamed = write_lines(tmp / "renamed.jsonl",
                          [{"turns": [{"who": r, "said": c} for r, c in turns]}])
    moesh.tokenize(renamed, tokenizer=folder, out=tmp / "renamed",
                   chat_fields={"messages": "turns", "role": "who", "content": "said"})
    assert trained_texts(folder, tmp / "renamed") == [both]
    path = tmp / "messages.jsonl"
    moesh.tokenize(path, tokenizer=folder, out=tmp / "short", no_end_of_turn=True)
    assert trained_texts(folder, tmp / "short") == [both.replace("<|eot|>]", "]<|eot|>")]
    moesh.tokenize(path, tokenizer=folder, out=tmp / "users", roles=["user"])
    # Not marked by the template: by the difference of two texts.
    assert trained_texts(folder, tmp / "users") == [
        f"[<|begin_of_text|>{user}Hi<|eot|>]{assistant}Hello<|eot|>[{user}Bye<|eot|>]{assistant}"
        "See you<|eot|>"], trained_texts(folder, tmp / "users")
    # As they are, with no template: the end is trained on as what it ends.
    strings = write_lines(tmp / "strings.jsonl", [{"prompt": "1 + 1 =", "completion": " 2"}])
    moesh.tokenize(strings, tokenizer=folder, out=tmp / "strings", append_eod=True)
    assert trained_texts(folder, tmp / "strings") == ["1 + 1 =[ 2<|eot|>]"]
    # Variables of a template, and tools as a string.
    template = tmp / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ' ' + mood + ':' + m.content }}"
                        "{{ tools | length if tools else '' }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ 'assistant ' + mood + ':' }}{% endif %}")
    calls = write_lines(tmp / "calls.jsonl", [
        {"system": "be", "tools": "[{}, {}]", "conversations": [
            {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
    moesh.tokenize(calls, tokenizer=folder, out=tmp / "calls", chat_template=template,
                   template_variable={"mood": "gay"})
    assert trained_texts(folder, tmp / "calls") == [
        "system gay:be2user gay:a2assistant gay:[b2]"], trained_texts(folder, tmp / "calls")


def messages_that_are_only_read(tmp):
    """By their own weight or train, with {% generation %} and without, and variables of a line."""
    user, answers = {"role": "user", "content": "a"}, [{"role": "assistant", "content": "b"},
                                                       {"role": "assistant", "content": "c"}]
    body = "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A' + mood }}BEGIN" \
           "{{ m.content }};END{% else %}U{{ m.content }}{% endif %}{% endfor %}" \
           "{% if add_generation_prompt %}{{ 'A' + mood }}{% endif %}"
    for name, begin, end in (("marked", "{% generation %}", "{% endgeneration %}"),
                             ("plain", "", "")):
        template = body.replace("BEGIN", begin).replace("END", end)
        folder = small_folder(tmp / name, template)
        for key in ("weight", "train"):
            def line(first, second, **more):
                return {"messages": [user, {**answers[0], **first}, user, {**answers[1], **second}],
                        "chat_template_kwargs": {"mood": "+"}, **more}
            path = write_lines(tmp / f"{name}-{key}.jsonl", [
                line({}, {}), line({key: 0}, {key: 1}), line({key: None}, {key: False}),
                line({key: False}, {key: 0}),
                line({}, {key: 0}, chat_template_kwargs={"mood": "-"}),
                {"conversations": [{"from": "human", "value": "a"},
                                   {"from": "gpt", "value": "b", key: 0},
                                   {"from": "human", "value": "a"},
                                   {"from": "gpt", "value": "c"}]}])
            done = moesh.tokenize(path, tokenizer=folder, out=tmp / f"{name}-{key}",
                                  template_variable={"mood": "="})
            assert done["without_trained_tokens"] == 1, done
            found = trained_texts(folder, tmp / f"{name}-{key}")
            assert found == ["UaA+[b;]UaA+[c;]", "UaA+b;UaA+[c;]", "UaA+[b;]UaA+c;",
                             "UaA-[b;]UaA-c;", "UaA=b;UaA=[c;]"], (name, key, found)


def counts_and_resumes(tmp):
    """What is left out is counted and named; a run that stopped goes on; the files check."""
    folder = small_folder(tmp)
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    never = {"messages": [{"role": "user", "content": "nobody answers"}]}
    lines = [good, never, {"what": 1}, good, never, {"messages": []}] * 40
    path = write_lines(tmp / "some.jsonl", lines)
    run = subprocess.run([sys.executable, "-m", "moesh", "tokenize", "--tokenizer", folder, "--out",
                          tmp / "out", "--on-error=skip", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for text in ("in 80 conversations of 1 file", "left out 80 conversations without a token to",
                 "skipped 80 lines that could not be read", "trained on: 160 tokens"):
        assert text in run.stdout, run.stdout
    assert f"{path}:2: no token of this conversation is trained on" in run.stderr, run.stderr
    checked = subprocess.run([os.environ["MOESH"], "tokenize", "--check", tmp / "out"],
                             capture_output=True, text=True)
    assert checked.returncode == 0 and "every byte" in checked.stdout, checked.stderr
    mask = (tmp / "out.mask").read_bytes()
    (tmp / "out.mask").write_bytes(bytes([1 - mask[0]]) + mask[1:])
    damaged = subprocess.run([os.environ["MOESH"], "tokenize", "--check", tmp / "out"],
                             capture_output=True, text=True)
    assert damaged.returncode == 2 and "out.mask" in damaged.stderr, damaged.stderr
    # Killed in the middle, and started again: the same bytes.
    many = write_lines(tmp / "many.jsonl", [good] * 10_000)
    args = [sys.executable, "-m", "moesh", "tokenize", "--tokenizer", folder,
            "--save-interval", "0"]
    whole = subprocess.run([*args, "--out", tmp / "whole", many], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    part = subprocess.Popen([*args, "--out", tmp / "part", many], stdout=subprocess.DEVNULL)
    progress = tmp / "part.progress"
    while part.poll() is None:
        if progress.exists():
            try:
                if json.loads(progress.read_text())["documents"] > 100:
                    part.kill()
                    break
            except ValueError:
                pass
    part.wait()
    had_ended = (tmp / "part.bin").exists()  # the signal came after the last file had its name
    again = subprocess.run([*args, "--out", tmp / "part", many], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert had_ended or "continued after document" in again.stdout, again.stdout
    for ending in ("bin", "idx", "mask"):
        assert (tmp / f"whole.{ending}").read_bytes() == (tmp / f"part.{ending}").read_bytes()


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATML = ("{% for m in messages if m.role in ('user', 'assistant') %}"
          "{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
# Neither the beginning nor the end of a turn is the same when others follow.
SHIFTING = "{% for m in messages %}{{ m.role ~ (messages | length) ~ m.content }}{% endfor %}"
BAD = [  # what is wrong, the line, what it says, options (template: of the folder)
    ("no template", {"messages": TURNS}, "has no chat template (chat_template.jinja, or",
     {"template": None}),
    ("a template that raises; roles in a wrong order", {"messages": TURNS[::-1]},
     "refuses it: roles must alternate: user, assistant, user, ...", {"template": MIXTRAL}),
    ("a template that is not Jinja2", {"messages": TURNS}, "line 2 of the template is not Jinja2",
     {"template": "\n{% for m in %}"}),
    ("a template for other fields",
     {"messages": [{"role": "user", "content": None, "tool_calls": [1]}]},
     "fails: TypeError: can only concatenate str", {"template": CHATML}),
    ("a template that leaves the sandbox", {"messages": TURNS},
     "refuses it: access to attribute '__class__' of 'str' object is unsafe",
     {"template": "{{ ''.__class__.__mro__ }}"}),
    ("a turn that moves when others follow", {"messages": TURNS * 2},
     "turn 0 (user): where it ends is not known", {"template": SHIFTING}),
    ("a conversation that begins with an answer", {"messages": TURNS[1:]},
     "turn 0 (assistant): nothing is before it that asks for an answer", {"template": CHATML}),
    ("broken JSON", '{"messages": [', "1: this line is not JSON (", {"chats": "messages"}),
    ("a line that is not an object", "[1]", "this line is a JSON list; each line is one",
     {"chats": "messages"}),
    ("unknown names of fields", {"dialog": TURNS},
     'this object has the fields "dialog", and a chat', {}),
    ("no messages", {"messages": []}, '"messages" is empty; it must be a list of messages', {}),
    ("a message without a role", {"messages": [{"speaker": "user", "content": "a"}]},
     'message 0 has no "role" that is a string (its fields: "speaker", "content")', {}),
    ("a message without content", {"messages": [*TURNS, {"role": "user"}]},
     'message 2 (user) has no "content" and no "tool_calls"; an empty answer is ""', {}),
    ("a role that the template leaves out", {"messages": [{"role": "bot", "content": "x"}, *TURNS]},
     "the template writes nothing of message 0, whose role is 'bot'", {"template": CHATML}),
    ("a usual role that the template leaves out",
     {"messages": [{"role": "developer", "content": "x"}, *TURNS]},
     "the template writes nothing of message 0, whose role is 'developer'", {"template": CHATML}),
    ("a tool's answer that the template leaves out",
     {"messages": [*TURNS, {"role": "tool", "content": [{"type": "text", "text": "a"}]}, *TURNS]},
     "the template writes nothing of message 2, whose role is 'tool'", {"template": CHATML}),
    ("a weight that is a part", {"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]},
     'message 1 has "weight": 0.5; it takes 1 or true', {}),
    ("variables that are not an object", {"messages": TURNS, "chat_template_kwargs": [1]},
     '"chat_template_kwargs" is a JSON list; it must be an object', {}),
    ("variables that are the messages",
     {"messages": TURNS, "chat_template_kwargs": {"messages": []}},
     '"chat_template_kwargs" has "messages", which each conversation has itself', {}),
    ("an unknown speaker", {"conversations": [{"from": "me", "value": "a"}]},
     "turn 0 is \"from\": 'me'; it takes human, user, gpt", {}),
    ("a history that is not pairs", {"instruction": "a", "output": "b", "history": [["x"]]},
     'entry 0 of "history" is not a pair of strings', {}),
    ("a picture", {"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]},
     "message 0 has a part of type 'image'; these models read text only", {}),
    ("tools that are not a list", {"messages": TURNS, "tools": {"a": 1}},
     '"tools" is a JSON object; it must be a list', {}),
    ("half of a surrogate pair", '{"messages": [{"role": "user", "content": "\\ud800"}, '
     '{"role": "assistant", "content": "b"}]}', "half of a surrogate pair", {"chats": "messages"}),
    ("nothing to train on", {"messages": TURNS[:1]},
     "none of the 1 conversations has a token that is trained on", {}),
    ("roles that nobody has", {"messages": TURNS}, "none of the 1 conversations has a token",
     {"roles": ["robot"]}),
    ("no role", {"messages": TURNS}, "--roles names no role", {"roles": ","}),
    ("an unknown format", {"messages": TURNS}, '--chats is "chatml"; it takes auto, messages,',
     {"chats": "chatml"}),
    ("an unknown field", {"messages": TURNS}, "--chat-fields names 'turns', which no format has",
     {"chat_fields": {"turns": "messages"}}),
    ("a template that is not there", {"messages": TURNS}, "cannot read the chat template",
     {"chat_template": "nowhere.jinja"}),
    ("the tokenizer's own template", {"messages": TURNS}, "--with-template is what the tokenizer",
     {"with_template": True}),
]


def bad_input(tmp):
    """Every row is refused with its sentence, which the page has as well; nothing is written."""
    page = (ROOT / "docs" / "chats.md").read_text(encoding="utf-8")
    model = small_folder(tmp)
    tokenizer = peer.Tokenizer.from_file(str(model / "tokenizer.json"))
    for number, (what, line, text, options) in enumerate(BAD):
        options = dict(options)
        folder = write_folder(tmp / f"model{number}", tokenizer, options.pop("template", LLAMA4),
                              "<|begin_of_text|>", "<|eot|>")
        path = tmp / f"{number}.jsonl"
        path.write_text((line if isinstance(line, str) else json.dumps(line)) + "\n")
        try:
            moesh.tokenize(path, tokenizer=folder, out=tmp / f"out{number}", **options)
        except moesh.Error as refused:
            assert text in str(refused), f"{what}: {refused}"
            assert refused.kind in ("data", "config"), refused.kind
        else:
            raise AssertionError(f"{what}: nothing was refused")
        assert f"| {what} | `{text}" in page, f"the page has no row of '{what}' with '{text}'"
        assert not (tmp / f"out{number}.bin").exists() and not (tmp / f"out{number}.mask").exists()
    without_jinja(tmp, model)
    of_the_program(tmp, model)


def without_jinja(tmp, model):
    lines = write_lines(tmp / "chats.jsonl", [{"messages": TURNS}] * 3)
    kept = {name: module for name, module in sys.modules.items() if name.startswith("jinja2")}
    sys.modules.update(dict.fromkeys(["jinja2", *kept]))
    try:
        moesh.tokenize(lines, tokenizer=model, out=tmp / "none")
        raise AssertionError("chats without Jinja2")
    except moesh.Error as refused:
        assert "which is not installed; pip install 'jinja2>=3.1.6'" in str(refused), refused
    finally:
        del sys.modules["jinja2"]
        sys.modules.update(kept)


def of_the_program(tmp, model):
    """What the program says of chats, and of masks that do not fit their tokens."""
    def refused(*args):
        run = subprocess.run([os.environ["MOESH"], *map(str, args)], capture_output=True, text=True)
        assert run.returncode == 2, run.stdout + run.stderr
        return run.stderr

    lines = tmp / "chats.jsonl"
    for options in ([], ["--chats=messages"]):
        text = refused("tokenize", "--tokenizer", model, "--out", tmp / "no", *options, lines)
        assert "python -m moesh tokenize" in text, text
    moesh.tokenize(lines, tokenizer=model, out=tmp / "good")
    mask = (tmp / "good.mask").read_bytes()
    train = ["train", "--model=qwen3_moe:tiny", "--model.vocab_size=2000", "--steps=1",
             "--data.sequence_length=8", "--data.shuffle=false", "--metrics.folder=",
             f"--data.path={tmp / 'good.bin'}"]
    (tmp / "good.mask").write_bytes(mask[:-1])
    for command in (train, ["inspect", tmp / "good"]):
        text = refused(*command)
        assert f"good.mask has {len(mask) - 1} bytes, and" in text, text
        assert "tokenize again" in text, text
    (tmp / "good.mask").write_bytes(b"\7" + mask[1:])
    for command in (train, ["inspect", tmp / "good"]):
        assert "byte 0 of its .mask is 7; it takes 1 for a token" in refused(*command)
    (tmp / "good.mask").unlink()
    for command in (train, ["inspect", tmp / "good"]):
        text = refused(*command)
        assert f"{tmp / 'good'}.mask is missing: it says which tokens are trained on" in text, text
        assert "or tokenize again. To train on every token, remove" in text, text
    (tmp / "good.moesh.json").rename(tmp / "kept.json")
    whole = subprocess.run([os.environ["MOESH"], *map(str, train)], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    (tmp / "good.mask").write_bytes(mask)
    for ending in ("bin", "idx"):
        (tmp / f"good.{ending}").unlink()
    try:  # tokens must not get the mask of others
        moesh.tokenize(lines, tokenizer=model, out=tmp / "good")
        raise AssertionError("a mask was overwritten")
    except moesh.Error as error:
        assert "good.mask is there already; choose another --out" in str(error), error


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for case in (against_transformers, formats, messages_that_are_only_read, counts_and_resumes,
                     bad_input):
            folder = pathlib.Path(name, case.__name__)
            folder.mkdir()
            case(folder, *(sys.argv[1:] if case is against_transformers else []))
            print(case.__name__, flush=True)
