"""The tokenizer and the special tokens of an exported model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gridformer.checkpoint.convert.importing import CONFIG, read_mapping, write_json
from gridformer.checkpoint.manifest import KEPT
from gridformer.checkpoint.side_files import GENERATION, KEPT_FILES
from gridformer.config import RunConfig
from gridformer.data import SpecialIds, Tokenizer, special_ids
from gridformer.data.chat import CHAT_FILE, read_chat, stop_ids
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.data.tokenizer import BEGINS, SETTINGS, spelled
from gridformer.utils.errors import DataError

# Keys of an imported config.json that name tokens, which our config does not hold.
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def write_tokenizer(
    folder: Path, root: Path, run: RunConfig, imported: bool = False
) -> dict[str, Any]:
    """Writes the files of a tokenizer, and returns the keys of config.json that name tokens.

    For a run that was imported, these are the files that it came with. For any other run it is the
    tokenizer of its data. Special tokens that the run has and the tokenizer does not, such as
    [MASK] or sentinels, are added to it: their ids follow the tokenizer's own.

    Args:
        folder: The folder of the exported model.
        root: The run directory, or the checkpoint that has copies of its files.
        run: The run.
        imported: Whether the weights are those of an import, unchanged.
    """
    kept = root / KEPT
    for name in KEPT_FILES:
        if name != CONFIG and (kept / name).is_file():
            shutil.copyfile(kept / name, folder / name)
    if (kept / CONFIG).is_file():
        before = read_mapping(kept / CONFIG)
        ids = {key: before[key] for key in _TOKEN_KEYS if key in before}
        if not imported:
            ids |= _read_by_heads(folder, root, run, ids) | _begun(folder, root)
    else:
        ids = _write_own(folder, root, run)
    if (root / CHAT_FILE).is_file():
        _write_chat(folder, root, ids)
    return ids


def _write_own(folder: Path, root: Path, run: RunConfig) -> dict[str, Any]:
    """Writes the tokenizer of a run's data, and returns the keys of config.json."""
    if not (root / TOKENIZER).is_file():
        return {}
    tokenizer = Tokenizer.load(root / TOKENIZER)
    special = special_ids(run, tokenizer)
    tokenizer.add_special(special.added)
    tokenizer.put_around(*_around(run, special, tokenizer))
    tokenizer.save(folder / TOKENIZER)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.max_seq_len,
        "clean_up_tokenization_spaces": False,
        **_named(
            special, tokenizer, decoder=not run.model.two_stacks and run.model.family != "bert"
        ),
    }
    if tokenizer.bos_token is not None:
        config[BEGINS] = True
    write_json(folder / SETTINGS, config, ascii=False)
    ids = {"eos_token_id": special.eos, "pad_token_id": special.pad}
    if not run.model.two_stacks and run.model.family != "bert":
        ids["bos_token_id"] = special.eos if tokenizer.bos_id is None else tokenizer.bos_id
    if run.model.two_stacks:
        ids["decoder_start_token_id"] = special.start
    return ids


def _around(
    run: RunConfig, special: SpecialIds, tokenizer: Tokenizer
) -> tuple[list[str], list[str]]:
    """Returns the special tokens around one text and around two, where the model has read them."""
    model = run.model
    eos = tokenizer.eos_token
    if model.family == "bert":
        cls, sep = tokenizer.token_of(special.cls or 0), tokenizer.token_of(special.sep or 0)
        assert cls is not None
        assert sep is not None
        return [cls, "$A", sep], [cls, "$A", sep, "$B:1", f"{sep}:1"]
    begin = [] if tokenizer.bos_token is None or model.two_stacks else [tokenizer.bos_token]
    if model.span_head:
        return [*(begin or [eos]), "$A", eos], [*(begin or [eos]), "$A", eos, "$B", eos]
    if model.token_head and not model.two_stacks:
        return [*begin, "$A"], [*begin, "$A", "$B"]
    end = [eos] * (special.eos != special.pad)
    return [*begin, "$A", *end], [*begin, "$A", eos, "$B", *end]


def _write_chat(folder: Path, root: Path, ids: Mapping[str, Any]) -> None:
    """Writes a chat template, and adds its end of an answer to the tokens that end a text."""
    chat = read_chat(root)
    (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
    if not (root / TOKENIZER).is_file():
        return
    tokenizer, file = Tokenizer.load(root / TOKENIZER), folder / GENERATION
    stops: list[int] = []
    with suppress(DataError), chat as template:
        stops = stop_ids(template, tokenizer)
    values = read_mapping(file) if file.is_file() else {**ids}
    said = values.get("eos_token_id", ids.get("eos_token_id"))
    ends = [*(said if isinstance(said, list) else [said]), tokenizer.eos_id, *stops]
    ends = [*dict.fromkeys(i for i in ends if i is not None)]
    if len(ends) > 1:
        write_json(file, {**values, "eos_token_id": ends}, ascii=False)


def _read_by_heads(
    folder: Path, root: Path, run: RunConfig, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the ids that classes for fine-tuning look for, as the run has used them.

    Decoders classify by the last token that is not padding, and T5 by the last end of text. The
    tokenizer pads by its own settings, so both name the same padding.
    """
    if run.model.token_head or run.model.family == "bert" or not (root / TOKENIZER).is_file():
        return {}
    tokenizer = Tokenizer.load(root / TOKENIZER)
    special = special_ids(run, tokenizer)
    ids = {"eos_token_id": special.eos, "pad_token_id": special.pad}
    if run.model.two_stacks:
        return ids | {"decoder_start_token_id": special.start}
    pad = before.get("pad_token_id")
    # The run's texts end with the end of text if that does not pad, and are classified there.
    if isinstance(pad, int) and tokenizer.token_of(pad) and not pad == special.eos != special.pad:
        ids["pad_token_id"] = pad
    _pad_with(folder, tokenizer.token_of(ids["pad_token_id"]))
    return ids


def _begun(folder: Path, root: Path) -> dict[str, Any]:
    """Writes with which token a run's documents begin, and returns the key of config.json."""
    if not (root / TOKENIZER).is_file():
        return {}
    tokenizer, settings = Tokenizer.load(root / TOKENIZER), folder / SETTINGS
    if tokenizer.bos_token is None:
        return {}
    values = read_mapping(settings) if settings.is_file() else {}
    write_json(settings, {**values, "bos_token": tokenizer.bos_token, BEGINS: True}, ascii=False)
    return {"bos_token_id": tokenizer.bos_id}


def _pad_with(folder: Path, token: str | None) -> None:
    """Writes which token pads into the files of a tokenizer that say it."""
    settings = folder / SETTINGS
    values = read_mapping(settings) if settings.is_file() else {}
    if spelled(values.get("pad_token")) != token:
        write_json(settings, {**values, "pad_token": token}, ascii=False)
    others = folder / "special_tokens_map.json"
    if others.is_file() and "pad_token" in (values := read_mapping(others)):
        write_json(others, {**values, "pad_token": token}, ascii=False)


def _named(special: SpecialIds, tokenizer: Tokenizer, decoder: bool) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json."""
    roles = {
        "eos_token": special.eos,
        "bos_token": (special.eos if tokenizer.bos_id is None else tokenizer.bos_id)
        if decoder
        else None,
        "pad_token": special.pad,
        "mask_token": special.mask,
        "cls_token": special.cls,
        "sep_token": special.sep,
    }
    named = {role: tokenizer.token_of(i) for role, i in roles.items() if i is not None}
    return {role: token for role, token in named.items() if token is not None}
