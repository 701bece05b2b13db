"""Renders a chat template in a process of its own, because a template is somebody else's program.

`gridformer.data.chat.template` starts this file with the template, which may come with a data set
or a model. jinja2's sandbox keeps it from Python's internals, and limits of the operating system on
memory and files hold for whatever it computes; its parent ends it when it takes too long. This file
imports nothing of gridformer, so it starts fast and has little in memory.

Requests and answers are JSON, one object a line. The first request is {"template", "special"}, and
the following ones are {"messages", "prompt"}. An answer is {"text", "answers"} or {"error"}.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MEMORY = 1 << 30  # bytes of address space
MOST_CHARS = 1 << 24  # of one conversation's text
MOST_FILTERED = 1 << 16  # characters of a text for a filter that may need far more time or memory
# They surround what a template declares an answer. Nobody can write them into a conversation,
# because they differ in each process.
_NAME = secrets.token_hex(16)
_BEGIN, _END = f"\x00{_NAME}<\x00", f"\x00{_NAME}>\x00"
_MARK = re.compile(f"\x00{_NAME}([<>])\x00")


class GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which contains what the model says."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Turns the block into a call that puts marks around its text; jinja2 calls it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment with what templates of the library transformers may use.

    There is no clock (`strftime_now`), so that the same conversation always gives the same text.
    """
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    for name in ("wordwrap", "urlize", "striptags"):
        made.filters[name] = _bounded(made.filters[name])
    made.globals["raise_exception"] = _refuse
    return made


def unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns a rendered text without marks, and where the answers in it begin and end."""
    clean, answers, begin, last = "", [], 0, 0
    for mark in _MARK.finditer(text):
        clean += text[last : mark.start()]
        last = mark.end()
        if mark[1] == "<":
            begin = len(clean)
        else:
            answers.append((begin, len(clean)))
    return clean + text[last:], answers


def rendered(template: jinja2.Template, special: dict[str, str], asked: dict[str, Any]) -> Any:
    """Returns the text of a conversation and its answers.

    Args:
        template: The compiled chat template.
        special: The special tokens that it may write, by name, such as `bos_token`.
        asked: A request: `messages`, and `prompt`, which says whether the prompt for an answer is
            added.

    Returns:
        `text`, and `answers` with the characters [begin, end) of each answer; or `error`, if the
        text is too long.
    """
    values = {"tools": None, "documents": None, **special}
    values |= {"messages": asked["messages"], "add_generation_prompt": asked["prompt"]}
    text = ""
    for piece in template.generate(**values):
        text += piece
        if len(text) > MOST_CHARS:
            return {"error": f"it writes more than {MOST_CHARS:,} characters"}
    text, answers = unmarked(text)
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
    raise jinja2.TemplateError(str(message))


def _limit() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answers requests until there are no more."""
    _limit()
    template: jinja2.Template | None = None
    special: dict[str, str] = {}
    for line in sys.stdin:
        asked, said = json.loads(line), {}
        try:
            if template is None:
                template = environment().from_string(asked["template"])
                special = asked["special"]
            else:
                said = rendered(template, special, asked)
        except MemoryError:
            said = {"error": "it takes too much memory"}
        except Exception as error:  # whatever a template does wrong
            where = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
            reason = " ".join(str(error).split())[:300]
            said = {"error": f"{where}{reason or type(error).__name__}"}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
