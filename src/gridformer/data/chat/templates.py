"""The chat template that a user names: a built-in one, a file, or the one of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gridformer.data.chat.stored import StoredChat
from gridformer.utils.errors import UserError
from gridformer.utils.files import UnreadableError, parse_json, read_text

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
