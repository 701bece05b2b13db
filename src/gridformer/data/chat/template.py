"""Chat templates: how a conversation becomes text, and where the answers in that text are.

A user names a built-in one, a file, or the one of a tokenizer. Token folders and run directories
keep theirs in chat.json.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import Field, ValidationError

from gridformer.config import Config
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import UnreadableError, parse_json, read_json, read_text

Message = dict[str, Any]  # "role" and "content", and what else a template may read
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
CHAT_FILE: Final = "chat.json"
MOST_TEMPLATE_CHARS = 1 << 18
PATIENCE_S = 20.0  # for one conversation
_RENDERER = Path(__file__).with_name("renderer.py")
OWN = "tokenizer"
_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

# The format of OpenAI's ChatML, which Qwen and others use, without a system message of its own.
_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] + '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- else -%}
        {{- message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
# The format of Llama 3 without tools and dates.
_LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] | trim + '<|eot_id|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
# Each template with the special tokens that it needs.
BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (
        _LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation.

    Attributes:
        text: The text.
        answers: Where the parts begin and end that the model is to say, in characters.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Renders conversations with a jinja template, as the library transformers does.

    The template runs in a process of its own, see `gridformer.data.chat.renderer`. Use it as a
    context manager, which ends that process.

    If the template marks answers with `{% generation %}`, these are the answers. Otherwise an
    answer begins where the text with the prompt for it ends, and it ends where the text of the
    conversation up to it does.

    Args:
        source: The template.
        special: The special tokens that it may write, such as `bos_token`, by name.
        origin: Where the template comes from, for errors.

    Raises:
        DataError: The template is too large or not a template.
    """

    def __init__(self, source: str, special: Mapping[str, str], origin: str) -> None:
        self.source, self.special, self.origin = source, dict(special), origin
        # If a template only mentions the word, this finds no answers.
        self.marks = "endgeneration" in source
        if len(source) > MOST_TEMPLATE_CHARS:
            raise self._problem(f"has {len(source):,} characters; {MOST_TEMPLATE_CHARS:,} may be")
        self._process = subprocess.Popen(
            # -P: the folder of this file is not searched for modules.
            [sys.executable, "-P", str(_RENDERER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._unread = b""
        try:
            self._ask({"template": source, "special": self.special})
        except DataError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process that renders."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text after which the model says the next answer."""
        return self._render(messages, prompt=True).text

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a whole conversation, and its answers.

        Raises:
            DataError: The template refuses the conversation, or does not tell where answers are.
        """
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

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = b""
        if not line:
            raise self._problem(
                f"did not answer within {PATIENCE_S:g} s or took more memory than it may"
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._problem(f"cannot be used for this ({said['error']})")
        return said

    def _line(self) -> bytes:
        """Returns the next line of the process; none if it has ended or takes too long."""
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], PATIENCE_S)
            part = os.read(pipe.fileno(), 1 << 20) if ready else b""
            if not part:
                self._process.kill()
                return b""
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _problem(self, what: str) -> DataError:
        return DataError(f"chat template {self.origin}: {what}")


class StoredChat(Config):
    """The content of chat.json.

    Attributes:
        template: The template.
        special: The special tokens that it may write, by name.
        origin: Where it comes from.
    """

    template: str
    special: dict[str, str] = Field(default_factory=dict)
    origin: str

    def open(self) -> ChatTemplate:
        """Starts the process that renders the template."""
        return ChatTemplate(self.template, self.special, self.origin)


def write_chat(folder: Path, chat: StoredChat) -> None:
    """Writes chat.json into a folder."""
    (folder / CHAT_FILE).write_text(chat.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_chat(folder: Path) -> StoredChat:
    """Reads chat.json of a folder.

    Raises:
        DataError: It is missing or damaged.
    """
    file = folder / CHAT_FILE
    try:
        return StoredChat.model_validate(read_json(file))
    except (UnreadableError, ValidationError) as error:
        reason = str(error) if isinstance(error, UnreadableError) else "it is damaged"
        raise DataError(
            f"{file}: no chat template can be read ({reason}); `gridformer prepare --chat` writes "
            f"one, which a run of data.task=chat keeps"
        ) from None


def open_template(spec: str, tokenizer: Path | None) -> tuple[StoredChat, tuple[str, ...]]:
    """Reads the template that a user names.

    Args:
        spec: `chatml`, `llama3`, `tokenizer` for the one beside a tokenizer.json, or the path of a
            jinja file.
        tokenizer: The tokenizer.json that is used, or its folder; None if one is trained.

    Returns:
        The template, and the special tokens that it needs from the tokenizer as far as is known.

    Raises:
        UserError: There is no such template.
    """
    beside = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    special = {} if beside is None else _special(_config(beside))
    if spec in BUILT_IN:
        template, needed = BUILT_IN[spec]
        return StoredChat(template=template, special=special, origin=spec), needed
    if spec != OWN:
        return StoredChat(template=_read(Path(spec)), special=special, origin=spec), ()
    if beside is None:
        raise UserError(
            f"--chat {OWN} takes the template of a tokenizer: name one with --tokenizer, or use "
            f"--chat chatml"
        )
    own = _own(beside)
    if own is None:
        raise UserError(
            f"--chat {OWN}: {beside} has neither {_FILE} nor a chat_template in {_CONFIG}: use "
            f"--chat chatml, llama3, or the path of a jinja file"
        )
    return StoredChat(template=own, special=special, origin=str(beside)), ()


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnreadableError as error:
        raise UserError(
            f"--chat {path}: is neither chatml, llama3 nor {OWN}, and as a file it cannot be read "
            f"({error.reason})"
        ) from None


def _own(folder: Path) -> str | None:
    if (folder / _FILE).is_file():
        return _read(folder / _FILE)
    found = _config(folder).get("chat_template")
    if isinstance(found, list):  # several with names
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        return {}
    try:
        found = parse_json(read_text(path))
    except (UnreadableError, json.JSONDecodeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return found if isinstance(found, dict) else {}


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json, which may be objects with a content."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
