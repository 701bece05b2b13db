"""A chat template: how a conversation becomes text, and where the answers in that text are."""

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
from typing import Any, Self

from gridformer.data.chat.messages import ASSISTANT, Message
from gridformer.utils.errors import DataError

MOST_TEMPLATE_CHARS = 1 << 18
PATIENCE_S = 20.0  # for one conversation
_RENDERER = Path(__file__).with_name("renderer.py")


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
