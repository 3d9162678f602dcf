"""Conversations as text, by the chat template of a model, and what of the text is trained on.

A template is a program for Jinja2, and comes with the model: it runs in Jinja2's sandbox, with the
functions that `transformers` gives it.
"""

import atexit
import bisect
import datetime
import hashlib
import json
import os
import re
import threading

from . import _moesh
from ._errors import error

FORMATS = {  # the fields by which each is known, and others that it may have
    "messages": (("messages",), ("role", "content", "tools")),
    "prompt_completion": (("prompt", "completion"), ("role", "content", "tools")),
    "sharegpt": (("conversations",), ("from", "value", "system", "tools")),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
}
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_response": "tool",
    "function_call": "assistant",
}
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
OLDEST_JINJA = (3, 1, 6)  # those before it let a template out of the sandbox
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # to each rendering
CURE = ("give it a template with {% generation %} around what the assistant says (--chat-template "
        "FILE), or leave the conversation out (--on-error=skip)")


def _refuse(text):
    raise error("data", text)


def _jinja():
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise error("config", "chats are written by templates of Jinja2, which is not installed; "
                    "pip install 'jinja2>=3.1.6'") from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", jinja2.__version__)[:3])
    if numbers < OLDEST_JINJA:
        raise error("config", f"Jinja2 is {jinja2.__version__}, whose sandbox is not safe; "
                    "pip install 'jinja2>=3.1.6'")
    return jinja2


# ---- templates


def _environment(jinja2, on_generation):
    """Jinja2 as chat templates expect it. on_generation(text) is told what {% generation %} has."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller):
            text = caller()
            on_generation(text)
            return text

    def check_name(key):
        if str(key).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {key!r}")

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args, **kwargs):
            for key in dict(*args[1:], **kwargs):
                check_name(key)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, key, value):
            check_name(key)
            jinja2.utils.Namespace.__setitem__(self, key, value)

    class Dict:  # not the type itself, which has more than a template needs
        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args):
            return dict.fromkeys(*args)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    now = datetime.datetime.now()  # the same in the whole run, or a prefix would not stay one
    environment.globals.update(raise_exception=raise_exception, namespace=Namespace, dict=Dict(),
                               strftime_now=now.strftime)
    return environment


class Template:
    """A compiled chat template: text of messages, and what {% generation %} has in it."""

    def __init__(self, source, name, variables):
        jinja2 = self.jinja2 = _jinja()
        self.name, self.variables = name, variables
        self.own_variables = {}  # of the conversation that is rendered
        self.written, self.marks = [], []  # of the conversation that is rendered
        environment = _environment(
            jinja2, lambda text: self.marks.append((sum(map(len, self.written)), text)))
        try:
            self.template = environment.from_string(source)
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as wrong:
            raise error("config", f"{name}: line {wrong.lineno} of the template is not Jinja2 "
                        f"({wrong.message})") from None
        self.has_generation = any(
            getattr(getattr(block.call, "node", None), "name", "") == "_mark"
            for block in parsed.find_all(jinja2.nodes.CallBlock))

    def render(self, messages, tools, prompt=False):
        """The text, and the parts of it that {% generation %} has, as pairs of places. `prompt`:
        with what begins an answer."""
        self.written, self.marks = [], []
        try:
            for block in self.template.generate(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
                    **{**self.variables, **self.own_variables}):
                self.written.append(block)
        except self.jinja2.TemplateError as wrong:
            _refuse(f"the template ({self.name}) refuses it: {wrong.message or wrong}")
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError,
                OverflowError, ZeroDivisionError) as wrong:
            _refuse(f"the template ({self.name}) fails: {type(wrong).__name__}: {wrong}; are the "
                    "fields of the messages those that it expects?")
        text = "".join(self.written)
        for begin, part in self.marks:
            if text[begin:begin + len(part)] != part:
                _refuse(f"the template ({self.name}) uses {{% generation %}} where its text is not "
                        "written in place, as in a macro; move it to the loop over the messages")
        return text, [(begin, begin + len(part)) for begin, part in self.marks]


def _read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as wrong:
        raise error("config", f"{path} is not JSON ({wrong})") from None


def _folder_of(tokenizer):
    return tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)


def _special_tokens(folder):
    """bos_token and the others as templates see them."""
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            continue
        for name, value in _read_json(path).items():
            if isinstance(value, dict):
                value = value.get("content")
            if name in SPECIAL_TOKENS and isinstance(value, str):
                found[name] = value
    return found


def _read_text(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as wrong:
        raise error("config", f"cannot read the chat template {path}: {wrong}") from None


def _sources(folder, template_file):
    """Templates by name: "default", and "tool_use" for conversations with tools where a model has
    one of its own. With the name of their file."""
    if template_file:
        return {"default": (_read_text(template_file), template_file)}
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(path):
        found = {"default": (_read_text(path), path)}
        tools = os.path.join(folder, "additional_chat_templates", "tool_use.jinja")
        if os.path.exists(tools):
            found["tool_use"] = (_read_text(tools), tools)
        return found
    path = os.path.join(folder, "tokenizer_config.json")
    given = _read_json(path).get("chat_template") if os.path.exists(path) else None
    if isinstance(given, str):
        return {"default": (given, path)}
    if isinstance(given, list):
        found = {entry["name"]: (entry["template"], path) for entry in given}
        if "default" in found:
            return found
    return {}


# ---- conversations


def _alias_reasoning(message):
    """What a message has thought, under all names that templates have for it."""
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


class Conversation:
    def __init__(self, messages, tools=None, num_prompt=0):
        self.messages = [_alias_reasoning(message) for message in messages]
        self.tools = tools
        self.num_prompt = num_prompt  # messages at the beginning that are only read
        self.only_read = {i for i, message in enumerate(messages) if _is_only_read(i, message)}
        self.variables = {}  # of its template


def _is_only_read(number, message):
    """As "weight": 0 (OpenAI) or "train": false says."""
    for key in ("weight", "train"):
        if message.get(key) not in (None, 0, 1):
            _refuse(f'message {number} has "{key}": {message[key]!r}; it takes 1 or true for a '
                    "message that is trained on as --roles says, 0 or false for one that is not")
    return any(message.get(key) == 0 for key in ("weight", "train"))


class Reader:
    """Lines of JSON as conversations."""

    def __init__(self, format, fields):
        self.format = format
        known = {name for needed, others in FORMATS.values() for name in (*needed, *others)}
        for name in fields:
            if name not in known:
                raise error("config", f"--chat-fields names '{name}', which no format has; it "
                            f"takes {', '.join(sorted(known))}")
        self.fields = {name: fields.get(name, name) for name in known}

    def read(self, line):
        """A Conversation, or a pair of strings: prompt and completion as they are."""
        try:
            line = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as wrong:
            _refuse(f"this line is not JSON ({wrong}); each line is one conversation, an object")
        if not isinstance(line, dict):
            _refuse(f"this line is a JSON {_kind(line)}; each line is one conversation, an object "
                    'such as {"messages": [...]}')
        chat = getattr(self, "_" + self._format_of(line))(line)
        if isinstance(chat, Conversation):
            chat.variables = self._variables(line)
        return chat

    def _variables(self, line):
        given = line.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            _refuse(f'"chat_template_kwargs" is a JSON {_kind(given)}; it must be an object of '
                    'variables of the template, such as {"enable_thinking": false}')
        for name in GIVEN & given.keys():
            _refuse(f'"chat_template_kwargs" has "{name}", which each conversation has itself; '
                    "leave it out")
        return given

    def _format_of(self, line):
        for name, (needed, _) in FORMATS.items():
            if self.format in ("auto", name) and all(self.fields[n] in line for n in needed):
                return name
        wanted = [f"{' with '.join(self.fields[n] for n in needed)} ({name})"
                  for name, (needed, _) in FORMATS.items() if self.format in ("auto", name)]
        there = ", ".join(f'"{key}"' for key in list(line)[:8])
        _refuse(f"this object has the fields {there or '(none)'}, and a chat has "
                f"{' or '.join(wanted)}; name the fields of this file with --chat-fields, as in "
                "messages=turns")

    def _get(self, line, name, kinds, default=None):
        value = line.get(self.fields[name])
        if value is None:
            return default
        if not isinstance(value, kinds):
            _refuse(f'"{self.fields[name]}" is a JSON {_kind(value)}; it must be '
                    f"{'a list' if kinds is list else 'a string'}")
        return value

    def _tools(self, line):
        tools = line.get(self.fields["tools"])
        if isinstance(tools, str):  # as some files have them
            try:
                tools = json.loads(tools) if tools.strip() else None
            except ValueError as wrong:
                _refuse(f'"{self.fields["tools"]}" is a string that is not JSON ({wrong})')
        if tools is not None and not isinstance(tools, list):
            _refuse(f'"{self.fields["tools"]}" is a JSON {_kind(tools)}; it must be a list')
        return tools or None

    def _message_list(self, given, name):
        if not isinstance(given, list) or not given:
            _refuse(f'"{name}" is {"empty" if given == [] else "a JSON " + _kind(given)}; it must '
                    "be a list of messages, at least one")
        role, content = self.fields["role"], self.fields["content"]
        messages = []
        for number, message in enumerate(given):
            if not isinstance(message, dict):
                _refuse(f"message {number} is a JSON {_kind(message)}; it must be an object, "
                        f'{{"{role}": "user", "{content}": "..."}}')
            if not isinstance(message.get(role), str):
                there = ", ".join(f'"{key}"' for key in list(message)[:8])
                _refuse(f'message {number} has no "{role}" that is a string (its fields: {there}); '
                        "name the fields of this file with --chat-fields, as in role=speaker")
            if message.get(content) is None and not message.get("tool_calls"):
                _refuse(f'message {number} ({message[role]}) has no "{content}" and no '
                        '"tool_calls"; an empty answer is ""')
            for part in message[content] if isinstance(message.get(content), list) else []:
                if isinstance(part, dict) and part.get("type", "text") != "text":
                    _refuse(f"message {number} has a part of type '{part['type']}'; these models "
                            "read text only")
            own = {"role": message[role]}
            if content in message:
                own["content"] = message[content]
            messages.append({**own, **{k: v for k, v in message.items()
                                       if k not in (role, content)}})
        return messages

    def _messages(self, line):
        name = self.fields["messages"]
        return Conversation(self._message_list(line[name], name), self._tools(line))

    def _prompt_completion(self, line):
        prompt, completion = (line[self.fields[n]] for n in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        before = self._message_list(prompt, self.fields["prompt"])
        behind = self._message_list(completion, self.fields["completion"])
        return Conversation(before + behind, self._tools(line), num_prompt=len(before))

    def _sharegpt(self, line):
        name, speaker, said = (self.fields[n] for n in ("conversations", "from", "value"))
        turns = line[name]
        if not isinstance(turns, list) or not turns:
            _refuse(f'"{name}" is {"empty" if turns == [] else "a JSON " + _kind(turns)}; it must '
                    f'be a list of {{"{speaker}": "human", "{said}": "..."}}')
        messages = []
        system = self._get(line, "system", str)
        if system:
            messages.append({"role": "system", "content": system})
        for number, turn in enumerate(turns):
            if not isinstance(turn, dict) or not isinstance(turn.get(said), str):
                _refuse(f'turn {number} has no "{said}" that is a string; name the fields of this '
                        "file with --chat-fields, as in from=role,value=content")
            role = SHAREGPT_ROLES.get(turn.get(speaker))
            if role is None:
                _refuse(f'turn {number} is "{speaker}": {turn.get(speaker)!r}; it takes '
                        f"{', '.join(SHAREGPT_ROLES)}")
            message = {"role": role, "content": turn[said]}
            if turn[speaker] == "function_call":
                message = {"role": role, "content": "", "tool_calls": _calls(turn[said], number)}
            messages.append({**message, **{k: turn[k] for k in ("weight", "train") if k in turn}})
        return Conversation(messages, self._tools(line))

    def _alpaca(self, line):
        text = {n: self._get(line, n, str, "")
                for n in ("instruction", "input", "output", "system")}
        messages = []
        if text["system"]:
            messages.append({"role": "system", "content": text["system"]})
        for number, pair in enumerate(self._get(line, "history", list, [])):
            if not (isinstance(pair, list) and len(pair) == 2
                    and all(isinstance(said, str) for said in pair)):
                _refuse(f'entry {number} of "{self.fields["history"]}" is not a pair of strings, '
                        "question and answer")
            messages += [{"role": "user", "content": pair[0]},
                         {"role": "assistant", "content": pair[1]}]
        asked = "\n".join(part for part in (text["instruction"], text["input"]) if part)
        return Conversation([*messages, {"role": "user", "content": asked},
                             {"role": "assistant", "content": text["output"]}])


def _kind(value):
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _calls(text, number):
    try:
        calls = json.loads(text)
    except ValueError as wrong:
        _refuse(f"turn {number} is a function_call that is not JSON ({wrong})")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(c, dict) and "name" in c for c in calls):
        _refuse(f'turn {number} is a function_call without a "name"')
    return [{"type": "function",
             "function": {"name": c["name"], "arguments": c.get("arguments", {})}} for c in calls]


# ---- what is trained on


class Turns:
    """Where the turns of a conversation are in its text, found by rendering parts of it."""

    def __init__(self, template, tokenizer, messages, tools, text):
        self.template, self.tokenizer = template, tokenizer
        self.messages, self.tools, self.text = messages, tools, text
        self.ends = {}

    def _render(self, messages, prompt=False):
        return self.template.render(messages, self.tools, prompt)[0] if messages else ""

    def _refuse(self, i, why):
        _refuse(f"turn {i} ({self.messages[i]['role']}): {why}; {CURE}")

    def begin(self, i):
        """Of an answer: behind what asks for it. Of any other turn: behind the one before."""
        if self.messages[i]["role"] != "assistant":
            return self.end(i - 1) if i > 0 else 0
        if i == 0:
            self._refuse(i, "nothing is before it that asks for an answer")
        asked = self._render(self.messages[:i], prompt=True)
        if self.text.startswith(asked):
            return len(asked)
        # What is before it is written in another way when it is the last, or the prompt begins what
        # the turn as it is written does not have: thinking, mostly.
        plain = self._render(self.messages[:i])
        if not asked.startswith(plain):
            self._refuse(i, "what is before it is written in another way when it is answered")
        before = len(plain) if self.text.startswith(plain) else self.end(i - 1)
        prompt = asked[len(plain):]
        shared = os.path.commonprefix([prompt, self.text[before:]]).encode()
        ends = [end for _, end in self.tokenizer.encode(prompt)[1]]
        kept = max((end for end in ends if end <= len(shared)), default=0)
        if prompt and not kept:
            self._refuse(i, f"it does not begin with the prompt for an answer, {prompt!r}")
        return before + len(shared[:kept].decode())

    def end(self, i):
        if i not in self.ends:
            self.ends[i] = self._end(i)
        return self.ends[i]

    def _end(self, i):
        messages, text = self.messages, self.text
        if i == len(messages) - 1:
            return len(text)
        so_far = self._render(messages[:i + 1])
        if text.startswith(so_far):
            return len(so_far)
        # The last turn is written in another way than those before it. It may have more at its
        # beginning: thinking.
        if messages[i]["role"] == "assistant" and so_far.startswith(text[:self.begin(i)]):
            begin = self.begin(i)
            said = messages[i].get("content")
            said = said if isinstance(said, str) else ""
            length = _length_of_end(so_far[begin:], text[begin:], said)
            if length:
                return begin + length
        # So it is asked with a question behind it, whose own text is what a second one adds.
        question = {"role": "user", "content": "?"}
        with_one = self._maybe([*messages[:i + 1], question])
        added = self._added([*messages[:i + 1], question], question)
        if added and with_one.endswith(added):
            before = with_one[:-len(added)]
            if text.startswith(before):
                return len(before)
        # Or its own text is what it adds when it is said again.
        if messages[i]["role"] != "assistant":
            added = self._added(messages[:i + 1], messages[i])
            if added and text.startswith(added, self.begin(i)):
                return self.begin(i) + len(added)
        # Or the text of the next message is known so, and where it is.
        added = self._added(messages[:i + 2], messages[i + 1])
        if added and added not in json.dumps(messages[i], ensure_ascii=False):
            begin = self.begin(i)
            found = text.find(added, begin)
            if found >= 0:
                return found
        self._refuse(i, "where it ends is not known, since the template writes it in another way "
                        "when others follow")

    def _maybe(self, messages):
        """The text, or nothing where the template refuses such messages."""
        try:
            return self._render(messages)
        except _moesh.Error:
            return ""

    def _added(self, messages, again):
        """What a message adds when it is said again."""
        once, twice = self._maybe(messages), self._maybe([*messages, again])
        return twice[len(once):] if once and twice.startswith(once) else ""


def _length_of_end(longer, text, said):
    """Characters of the longest end of `longer` that `text` begins with. What was said is in it."""
    start = text[:4]
    place = longer.find(start) if start else -1
    while place >= 0:
        end = longer[place:]
        if text.startswith(end):
            return len(end) if said.strip() in end or said.strip() not in longer else 0
        place = longer.find(start, place + 1)
    return 0


class Renderer:
    """What the C++ side asks for: `facts`, and `render` of a line."""

    def __init__(self, format, tokenizer, template_file, roles, fields, variables):
        self.reader = Reader(format, fields)
        self.lock = threading.Lock()  # a template remembers where it is
        self.roles = set(roles)
        folder = _folder_of(tokenizer)
        self.folder = folder
        self.tokenizer = _moesh.Tokenizer.read(tokenizer)
        given = {**_special_tokens(folder), **{k: _value(v) for k, v in variables.items()}}
        sources = _sources(folder, template_file)
        self.templates = {name: Template(source, file, given)
                          for name, (source, file) in sources.items()
                          if name in ("default", "tool_use")}
        what = [format, sorted(roles), sorted(fields.items()), sorted(given.items()),
                sorted((name, source) for name, (source, _) in sources.items())]
        self.facts = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def render(self, line):
        """Text, and the bytes of its UTF-8 that are trained on, from a line of JSON."""
        chat = self.reader.read(line)
        if isinstance(chat, Conversation):
            with self.lock:
                text, spans = self._spans(chat)
        else:
            prompt, completion = chat
            text, spans = prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        try:
            places = _byte_places(text, spans)
        except UnicodeEncodeError:
            _refuse("it has half of a surrogate pair (\\ud800 to \\udfff), which is not text")
        return text, places

    def _spans(self, chat):
        messages, tools = chat.messages, chat.tools
        if not self.templates:
            raise error("config", f"'{self.folder}' has no chat template (chat_template.jinja, or "
                        "chat_template in tokenizer_config.json); name one with --chat-template")
        template = self.templates["default"]
        if tools is not None:
            template = self.templates.get("tool_use", template)
        template.own_variables = chat.variables
        text, marks = template.render(messages, tools)
        _check_all_is_written(template, messages, tools, text)
        by_marks = template.has_generation and "assistant" in self.roles
        spans = []
        if by_marks:
            def num_marks(num_messages):
                before = messages[:num_messages]
                return len(template.render(before, tools)[1]) if before else 0

            left_out = set(range(num_marks(chat.num_prompt)))
            for i in chat.only_read:
                if messages[i]["role"] == "assistant":
                    left_out.update(range(num_marks(i), num_marks(i + 1)))
            spans += [mark for i, mark in enumerate(marks) if i not in left_out]
        turns = Turns(template, self.tokenizer, messages, tools, text)
        for i in range(chat.num_prompt, len(messages)):
            role = messages[i]["role"]
            if (role in self.roles and i not in chat.only_read
                    and not (by_marks and role == "assistant")):
                span = turns.begin(i), turns.end(i)
                if span[0] > span[1]:
                    turns._refuse(i, "it ends before it begins")
                spans.append(span)
        return text, sorted(spans)


def _check_all_is_written(template, messages, tools, text):
    """A message whose role the template does not know would be left out without a word. Of what the
    assistant says a template may leave something out: thinking."""
    mark = "Q7w"
    while mark in text:
        mark += "q"

    def changed(places, change):
        return [{**message, "content": _changed(message["content"], change(i))} if i in places
                else message for i, message in enumerate(messages)]

    def render(changed_messages):
        try:
            return template.render(changed_messages, tools)[0]
        except _moesh.Error:  # such a text is not taken: it is read
            return None

    asked = [i for i, message in enumerate(messages)
             if message["role"] != "assistant" and _changed(message.get("content"), str)]
    marked = render(changed(asked, lambda i: lambda said: f"{said} {mark}{i}e")) or ""
    for i in asked:
        if (f"{mark}{i}e" not in marked
                and render(changed([i], lambda _: lambda said: mark)) == text):
            _refuse(f"the template writes nothing of message {i}, whose role is "
                    f"'{messages[i]['role']}'; give it a role that the template writes, or name "
                    "another template (--chat-template FILE)")


def _changed(content, change):
    """A content with its text changed, in the last of its parts that has any; None if none has."""
    if isinstance(content, str):
        return change(content) if content.strip() else None
    for i, part in reversed(list(enumerate(content if isinstance(content, list) else []))):
        text = _changed(part.get("text") if isinstance(part, dict) else part, change)
        if text:
            part = {**part, "text": text} if isinstance(part, dict) else text
            return [*content[:i], part, *content[i + 1:]]
    return None


def _value(text):
    """Of a variable: JSON, or else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _byte_places(text, spans):
    """Places of characters as places in UTF-8."""
    places = sorted({place for span in spans for place in span})
    bytes_at, done, total = [], 0, 0
    for place in places:
        total += len(text[done:place].encode())
        done = place
        bytes_at.append(total)
    text[done:].encode()
    return [tuple(bytes_at[bisect.bisect_left(places, place)] for place in span)
            for span in spans]


_moesh.set_chat_templates(Renderer)
atexit.register(_moesh.set_chat_templates, None)
