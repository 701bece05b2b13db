"""Conversations as text for a model: templates, records, and which tokens are answers.

A template is somebody else's program, so it is rendered in a process of its own: this file, run as
a program, which imports nothing of gridformer. jinja2's sandbox keeps it from Python's internals;
limits of the operating system on time, memory and files hold for whatever it computes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if __name__ != "__main__":
    from gridformer.data.tokenizer import SETTINGS, Tokenizer, spelled
    from gridformer.utils.errors import DataError, UserError
    from gridformer.utils.files import UnreadableError, read_json, read_text
if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]  # "role" and "content", and what else a template may read
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
# The keys by which a record is recognized, in the order in which they are looked for.
FORMS = (("messages",), ("instruction", "output"), ("prompt", "completion"))
CHAT_FILE: Final = "chat.json"
MOST_TEMPLATE_CHARS = 1 << 18
PATIENCE_S = 20.0  # for one conversation
MOST_MEMORY = 1 << 30  # bytes of address space of the process that renders
MOST_CHARS = 1 << 24  # of one conversation's text
MOST_FILTERED = 1 << 16  # characters of a text for a filter that may need far more time or memory
OWN = "tokenizer"
_FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# These surround what a template declares an answer. They differ in each process, so that nobody
# can write them into a conversation.
_NAME = secrets.token_hex(16)
_BEGIN, _END = f"\x00{_NAME}<\x00", f"\x00{_NAME}>\x00"
_MARK = re.compile(f"\x00{_NAME}([<>])\x00")

# The templates of templates/NAME.jinja with the special tokens that they need: the format of
# OpenAI's ChatML, which Qwen and others use, without a system message of its own; and that of
# Llama 3 without tools and dates.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


class Rendered(NamedTuple):
    """The text of a conversation, and the characters [begin, end) of each answer in it."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Renders conversations with a jinja template, as the library transformers does.

    Use it as a context manager, which starts the process that renders and ends it. A pickled one
    starts its own. If the template marks answers with `{% generation %}`, these are the answers.
    Otherwise an answer begins where the text with the prompt for it ends, and it ends where the
    text of the conversation up to it does.

    Raises:
        DataError: The template is none, is too large, or refuses a conversation.
    """

    def __init__(self, template: str, special: Mapping[str, str], origin: str) -> None:
        self.template, self.special, self.origin = template, dict(special), origin
        # If a template only mentions the word, this finds no answers.
        self.marks = "endgeneration" in template
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.template, self.special, self.origin)

    def close(self) -> None:
        """Ends the process that renders."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text after which the model says the next answer."""
        return self._render(messages, prompt=True).text

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a whole conversation, and its answers."""
        whole = self._render(messages)
        if self.marks:
            return whole
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.prompt(messages[:number])
            until = self._render(messages[: number + 1]).text
            if not (whole.text.startswith(until) and until.startswith(before)):
                raise self._problem(
                    "does not show where answers begin and end: write {% generation %} and "
                    "{% endgeneration %} around them in a copy of it, or choose another template"
                )
            answers.append((len(before), len(until)))
        return Rendered(whole.text, tuple(answers))

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> Rendered:
        said = self._ask({"messages": list(messages), "prompt": prompt})
        return Rendered(said["text"], tuple((a, b) for a, b in said["answers"]))

    def _start(self) -> subprocess.Popen[bytes]:
        if len(self.template) > MOST_TEMPLATE_CHARS:
            most = f"{MOST_TEMPLATE_CHARS:,} may be"
            raise self._problem(f"has {len(self.template):,} characters; {most}")
        # -P: the folder of this file is not searched for modules.
        words, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:
            self._ask({"template": self.template, "special": self.special})
        except DataError:
            self.close()
            raise
        return self._process

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends an object as a line of JSON, and returns the one with which the process answers."""
        process, line = self._process or self._start(), b""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            asked = json.dumps(request | {"seconds": PATIENCE_S})
            process.stdin.write(asked.encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):  # it was ended
            raise self._problem(
                f"did not answer within {PATIENCE_S:g} s or took more memory than it may"
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._problem(f"cannot be used for this ({said['error']})")
        return said

    def _problem(self, what: str) -> DataError:
        return DataError(f"chat template {self.origin}: {what}")


def write_chat(folder: Path, chat: ChatTemplate) -> None:
    """Writes chat.json into a folder."""
    content = {"template": chat.template, "special": chat.special, "origin": chat.origin}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / CHAT_FILE).write_text(text + "\n", encoding="utf-8")


def read_chat(folder: Path) -> ChatTemplate:
    """Reads chat.json of a folder."""
    file, reason = folder / CHAT_FILE, "it is damaged"
    try:
        content = read_json(file)
        texts = [content["template"], content["origin"], *content["special"].values()]
        if all(isinstance(text, str) for text in texts):
            return ChatTemplate(**content)
    except UnreadableError as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError):
        pass
    raise DataError(
        f"{file}: no chat template can be read ({reason}); `gridformer prepare --chat` writes "
        f"one, which a run of data.task=chat keeps"
    )


def open_template(spec: str, tokenizer: Path | None) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Reads the template that a user names.

    Args:
        spec: `chatml`, `llama3`, `tokenizer` for the one beside a tokenizer.json, or the path of a
            jinja file.

    Returns:
        The template, and the special tokens that it needs from the tokenizer as far as is known.
    """
    folder = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    config: dict[str, Any] = {}
    if folder is not None and (folder / SETTINGS).is_file():
        try:
            config = dict(read_json(folder / SETTINGS))
        except (UnreadableError, ValueError, TypeError) as error:
            raise UserError(f"{folder / SETTINGS}: cannot be read ({error})") from None
    texts = {name: spelled(config.get(name)) for name in _SPECIAL}
    special = {name: text for name, text in texts.items() if text is not None}
    if spec in BUILT_IN:
        source = _read(Path(__file__).with_name("templates") / f"{spec}.jinja")
        return ChatTemplate(source, special, origin=spec), BUILT_IN[spec]
    if spec != OWN:
        return ChatTemplate(_read(Path(spec)), special, origin=spec), ()
    if folder is None:
        raise UserError(
            f"--chat {OWN} takes the template of a tokenizer: name one with --tokenizer, or use "
            f"--chat chatml"
        )
    own = config.get("chat_template")
    if (folder / _FILE).is_file():
        own = _read(folder / _FILE)
    elif isinstance(own, list):  # several with names
        named = {str(one.get("name")): one.get("template") for one in own if isinstance(one, dict)}
        own = named.get("default")
    if not isinstance(own, str):
        raise UserError(
            f"--chat {OWN}: {folder} has neither {_FILE} nor a chat_template in {SETTINGS}: use "
            f"--chat chatml, llama3, or the path of a jinja file"
        )
    return ChatTemplate(own, special, origin=str(folder)), ()


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnreadableError as error:
        raise UserError(
            f"--chat {path}: is neither chatml, llama3 nor {OWN}, and as a file it cannot be read "
            f"({error.reason})"
        ) from None


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """Returns the conversation of a record.

    It is one of {"messages": [{"role", "content"}, ...]}, {"instruction", "input", "output"} and
    {"prompt", "completion"}, whose values are texts or lists of messages. A text under "system"
    comes first in the latter two.
    """
    form = next((keys for keys in FORMS if all(key in record for key in keys)), None)
    if form is None:
        raise DataError(
            f"{where}: is not a conversation; a record has messages, or instruction and output, or "
            f"prompt and completion, and this one has {', '.join(sorted(record)) or 'no keys'}"
        )
    if form == ("messages",):
        return _messages(record["messages"], where, "messages")
    talk = [_message(SYSTEM, record["system"], where, "system")] if record.get("system") else []
    for key, role in zip(form, (USER, ASSISTANT)):
        if isinstance(value := record[key], list):
            talk += _messages(value, where, key)
        else:
            talk.append(_message(role, value, where, key))
        if key == "instruction" and record.get("input"):
            more = _message(USER, record["input"], where, "input")
            talk[-1]["content"] += "\n\n" + more["content"]
    return talk


class Encoded(NamedTuple):
    """A conversation as tokens, and for each whether it belongs to an answer."""

    ids: list[int]
    answer: list[bool]


def encode(
    conversations: Sequence[Sequence[Message]], template: ChatTemplate, tokenizer: Tokenizer
) -> list[Encoded]:
    """Returns conversations as tokens, as transformers' `apply_chat_template` does.

    A token belongs to an answer if one of its characters does.
    """
    rendered = [template.render(messages) for messages in conversations]
    encoded = []
    for one, (ids, spans) in zip(rendered, tokenizer.encode_marked([r.text for r in rendered])):
        answer = [False] * len(ids)
        place = 0
        for begin, end in one.answers:
            while place < len(ids) and spans[place][1] <= begin:
                place += 1
            while place < len(ids) and spans[place][0] < end:
                answer[place] = True
                place += 1
        encoded.append(Encoded(ids, answer))
    return encoded


def stop_ids(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the special token with which answers end, if the template has one."""
    talk = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    try:
        (encoded,) = encode([talk], template, tokenizer)
    except DataError:  # a template that needs more, or does not tell where answers are
        return []
    said = [number for number, is_said in zip(encoded.ids, encoded.answer) if is_said]
    return [number for number in said if number in tokenizer.special_ids][-1:]


def spells_special(messages: Sequence[Message], tokenizer: Tokenizer) -> bool:
    """Returns whether a message contains a special token as text, which could forge a turn."""
    special = tokenizer.special_tokens
    return any(name in m["content"] for m in messages for name in special)


def _messages(value: object, where: str, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: '{key}' is not a list of messages")
    messages = []
    for number, message in enumerate(value):
        at = f"{key}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {at} is not an object with the keys role and content")
        messages.append({**message, **_message(message["role"], message.get("content"), where, at)})
    return messages


def _message(role: str, content: object, where: str, key: str) -> Message:
    if not isinstance(content, str):
        raise DataError(f"{where}: the content of '{key}' is {type(content).__name__}, not text")
    return {"role": role, "content": content}


# --------------------------------------------------------------------- the process that renders


def environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment with what templates of the library transformers may use.

    There is no clock (`strftime_now`), so that the same conversation always gives the same text.
    The block `{% generation %} ... {% endgeneration %}` contains what the model says.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    for name in ("wordwrap", "urlize", "striptags"):
        made.filters[name] = _bounded(made.filters[name])
    made.globals["raise_exception"] = _refuse
    return made


def _rendered(template: Any, special: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    """Answers a request with the text of a conversation and its answers, or with an error."""
    values = {"tools": None, "documents": None, **special}
    values |= {"messages": asked["messages"], "add_generation_prompt": asked["prompt"]}
    marked = ""
    for piece in template.generate(**values):
        marked += piece
        if len(marked) > MOST_CHARS:
            return {"error": f"it writes more than {MOST_CHARS:,} characters"}
    # Texts and marks in turn.
    text, answers, begin = "", [], 0
    for number, piece in enumerate(_MARK.split(marked)):
        if number % 2 == 0:
            text += piece
        elif piece == "<":
            begin = len(text)
        else:
            answers.append((begin, len(text)))
    return {"text": text, "answers": answers}


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=False, indent=indent, **known)


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that refuses long texts, over which it would take minutes or gigabytes."""

    @functools.wraps(filter_)
    def bounded(*given: Any, **options: Any) -> Any:
        if any(isinstance(one, str) and len(one) > MOST_FILTERED for one in given):
            _refuse(f"{filter_.__name__[3:]} takes at most {MOST_FILTERED:,} characters")
        return filter_(*given, **options)

    return bounded


def _refuse(message: object) -> None:
    raise ValueError(str(message))


def _main() -> None:
    """Answers requests until there are no more."""
    import resource

    for limit, most in (("AS", MOST_MEMORY), ("FSIZE", 0), ("CORE", 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    template: Any = None
    special: dict[str, str] = {}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, whatever it is doing
    for line in sys.stdin:
        asked, said = json.loads(line), {}
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
        try:
            if template is None:
                template = environment().from_string(asked["template"])
                special = asked["special"]
            else:
                said = _rendered(template, special, asked)
        except MemoryError:
            said = {"error": "it takes too much memory"}
        except Exception as error:  # whatever a template does wrong
            where = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
            reason = " ".join(str(error).split())[:300]
            said = {"error": f"{where}{reason or type(error).__name__}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
