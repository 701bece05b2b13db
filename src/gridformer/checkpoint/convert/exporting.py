"""`gridformer export`: the last checkpoint of a run becomes a folder of Hugging Face."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.convert.importing import (
    CONFIG,
    INDEX,
    WEIGHTS,
    DType,
    read_mapping,
    write_json,
)
from gridformer.checkpoint.convert.kinds import KINDS, kinds_of
from gridformer.checkpoint.convert.table import (
    Form,
    Kind,
    TableEntry,
    head_problem,
    label_keys,
)
from gridformer.checkpoint.manifest import (
    KEPT,
    advice_for_readers,
    read_manifest,
    verify_checkpoint,
)
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.checkpoint.side_files import (
    GENERATION,
    KEPT_FILES,
    copy_files,
    load_tokenizer,
    root_of,
)
from gridformer.checkpoint.whole import StoredParameters, shapes_of, write_in_files
from gridformer.config import ModelConfig, RunConfig, Task, any_of, factory
from gridformer.data import SpecialIds, Tokenizer, special_ids
from gridformer.data.chat import CHAT_FILE, read_chat, stop_ids
from gridformer.data.side_texts import read_label_names
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.data.tokenizer import BEGINS, SETTINGS, spelled
from gridformer.models import NetworkModel
from gridformer.parallel.network.replacing import orders_of
from gridformer.utils.errors import ConfigError, DataError
from gridformer.utils.files import new_folder, refuse_existing
from gridformer.utils.units import GIB

# Keys of an imported config.json that name tokens, which our config does not hold.
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class Exported(NamedTuple):
    """What an export has written; `architecture` is the class of transformers that opens it."""

    model_type: str
    architecture: str
    n_parameters: int
    n_files: int
    step: int


def export_run(
    run_dir: Path,
    out: Path,
    dtype: DType = "keep",
    shard_gib: float = 5.0,
    tell: Callable[[str], None] = lambda doing: None,
) -> Exported:
    """Converts a checkpoint to a new folder that `from_pretrained` opens.

    Args:
        run_dir: A run directory, whose last checkpoint is taken, or one of its checkpoints.
        dtype: The type of the tensors; keep means that in which each is stored.
        shard_gib: The largest size of a file in GiB. A larger tensor has a file of its own.

    Raises:
        ConfigError: The model has no counterpart. It lists all problems at once.
        CheckpointError: There is no checkpoint, or it is damaged.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    if shard_gib <= 0:
        raise ConfigError(f"--shard-gib {shard_gib:g} is not above 0: use 5, for example")
    folder = find.newest(run_dir)
    with advice_for_readers(folder):
        manifest = read_manifest(folder)
    root, model = root_of(folder), manifest.model
    if (root / TOKENIZER).is_file() and not (root / KEPT / CONFIG).is_file():
        load_tokenizer(folder, manifest)  # which refuses that of another model
    run = RunConfig.model_validate(manifest.run)
    shapes = shapes_of(model)
    if model.family == "network":
        config = _config_of_network(model)
        entries = {entry.ours: (entry, 0) for entry in entries_of_network(model)}
    else:
        kind, config = _kind_of(model, run.task, root / KEPT)
        config = {"model_type": kind.model_type, **config}
        entries = {
            kind.renamed(model, name): (entry, part)
            for entry in kind.entries(model)
            for part, name in enumerate(entry.theirs)
        }
    tell("verifying the checkpoint")
    with advice_for_readers(folder):
        verify_checkpoint(folder)
    stored = StoredParameters(folder, manifest, shapes)
    streamed = {name: _streamed(*which, stored, dtype) for name, which in entries.items()}
    if model.family == "network":
        streamed |= _buffers_of_network(model)
    with new_folder(out) as writing:
        n_files = write_weight_files(streamed, writing, int(shard_gib * GIB), tell)
        imported = manifest.weights_only and not manifest.step
        tokens = write_tokenizer(writing, root, run, imported)
        types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in streamed.values())
        if "id2label" in config and (names := read_label_names(root)):
            config |= label_keys(model.n_labels, names)
        values = {"model_type": config["model_type"], **tokens, **config}
        values["torch_dtype"] = types.most_common(1)[0][0]
        write_json(writing / CONFIG, values)
    n_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    architecture = config["architectures"][0]
    return Exported(config["model_type"], architecture, n_parameters, n_files, manifest.step)


def entries_of_network(model: ModelConfig) -> Iterator[TableEntry]:
    """Yields how the parameters of a network of transformers are stored: under their own names."""
    orders = orders_of(model)

    def form_of(name: str) -> Form:
        dim, order = orders.get(name, (0, None))

        def theirs(ours: Tensor) -> list[Tensor]:
            return [
                ours if order is None else ours.index_select(dim, order.argsort().to(ours.device))
            ]

        return Form(lambda theirs: theirs[0], theirs)

    for name in shapes_of(model):
        yield TableEntry(name, (name,), form_of(name))


def _config_of_network(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a network of transformers."""
    if model.folder:
        return read_mapping(Path(model.folder) / CONFIG)
    module = factory.on_meta(model.factory).module
    kind, config = type(module).__name__, vars(module).get("config")
    if not config or not hasattr(config, "to_dict"):
        raise ConfigError(
            f"model.factory={model.factory}: transformers has no {kind} that could open a folder: "
            "read its checkpoints with gridformer or torch.distributed.checkpoint"
        )
    values: dict[str, Any] = config.to_dict()
    return {**values, "architectures": [kind]}


def _buffers_of_network(config: ModelConfig) -> dict[str, Streamed]:
    with torch.device("meta"):
        model = NetworkModel(config)
    model.fill_buffers(torch.device("cpu"))
    buffers = model.stored_buffers().items()
    return {n: Streamed((*b.shape,), b.dtype, partial(b.clone)) for n, b in buffers}


def _kind_of(model: ModelConfig, task: Task, kept: Path) -> tuple[Kind, dict[str, Any]]:
    """Returns the kind that represents a model (that of its import if several do), and its keys."""
    kinds = kinds_of(model)
    if not kinds:
        families = any_of(dict.fromkeys(kind.family for kind in KINDS.values()))
        raise ConfigError(
            f"model.family={model.family} has no counterpart in transformers: only {families} do"
        )
    if problem := head_problem(model, task):
        raise ConfigError(f"model.{problem}")
    if (kept / CONFIG).is_file():
        before = read_mapping(kept / CONFIG).get("model_type")
        kinds.sort(key=lambda kind: kind.model_type != before)
    problems: list[str] = []
    for kind in kinds:
        config = kind.write_config(model, task)
        if isinstance(config, dict):
            return kind, config
        problems += config
    raise ConfigError(*(f"model.{problem}" for problem in dict.fromkeys(problems)))


def _streamed(entry: TableEntry, part: int, stored: StoredParameters, dtype: DType) -> Streamed:
    """Returns one of their tensors."""
    name, form = entry.ours, entry.form
    written = stored.dtype(name) if dtype == "keep" else getattr(torch, dtype)
    shape = form.shape_of_theirs(stored.shapes[name])
    return Streamed(shape, written, lambda: form.theirs(stored.whole(name))[part])


def write_weight_files(
    streamed: dict[str, Streamed],
    folder: Path,
    most: int,
    tell: Callable[[str], None] = lambda doing: None,
) -> int:
    """Writes tensors as transformers does, with an index if there are several files.

    Returns:
        The number of files, each of which has at most `most` bytes or one tensor.
    """
    written = write_in_files(
        folder,
        streamed,
        most,
        lambda i, n: WEIGHTS if n == 1 else f"model-{i:05d}-of-{n:05d}.safetensors",
        lambda names: {"format": "pt"},
        tell,
    )
    if len(written) > 1:
        size = sum(tensor.n_bytes for tensor in streamed.values())
        weight_map = {name: file for file, (names, _) in written.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return len(written)


# ------------------------------------------------------------------ tokenizer and special tokens


def write_tokenizer(
    folder: Path, root: Path, run: RunConfig, imported: bool = False
) -> dict[str, Any]:
    """Writes the files of a tokenizer, and returns the keys of config.json that name tokens.

    For a run that was imported, these are the files that it came with. For any other run it is the
    tokenizer of its data. Special tokens that the run has and the tokenizer does not, such as
    [MASK] or sentinels, are added to it: their ids follow the tokenizer's own.

    `root` is the run directory, or a checkpoint with copies of its files; `imported` says that the
    weights are those of an import, unchanged.
    """
    kept, own, ids = root / KEPT, root / TOKENIZER, {}
    copy_files(kept, folder, [name for name in KEPT_FILES if name != CONFIG])
    if (kept / CONFIG).is_file():
        before = read_mapping(kept / CONFIG)
        ids = {key: before[key] for key in _TOKEN_KEYS if key in before}
        if own.is_file() and not imported:
            tokenizer = Tokenizer.load(own)
            ids |= _read_by_heads(folder, tokenizer, run, ids) | _begun(folder, tokenizer)
    elif own.is_file():
        ids = _write_own(folder, Tokenizer.load(own), run)
    if (root / CHAT_FILE).is_file():
        _write_chat(folder, root, ids)
    return ids


def _write_own(folder: Path, tokenizer: Tokenizer, run: RunConfig) -> dict[str, Any]:
    """Writes the tokenizer of a run's data, and returns the keys of config.json."""
    special = special_ids(run, tokenizer)
    tokenizer.add_special(special.added)
    tokenizer.put_around(*_around(run, special, tokenizer))
    tokenizer.save(folder / TOKENIZER)
    decoder = not run.model.two_stacks and run.model.family != "bert"
    bos = special.eos if tokenizer.bos_id is None else tokenizer.bos_id
    roles = {
        "eos_token": special.eos,
        "bos_token": bos if decoder else None,
        "pad_token": special.pad,
        "mask_token": special.mask,
        "cls_token": special.cls,
        "sep_token": special.sep,
    }
    named = {role: tokenizer.token_of(i) for role, i in roles.items() if i is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.max_seq_len,
        "clean_up_tokenization_spaces": False,
        **{role: token for role, token in named.items() if token is not None},
    }
    if tokenizer.bos_token is not None:
        config[BEGINS] = True
    write_json(folder / SETTINGS, config, ascii=False)
    ids = {"eos_token_id": special.eos, "pad_token_id": special.pad}
    if decoder:
        ids["bos_token_id"] = bos
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
    folder: Path, tokenizer: Tokenizer, run: RunConfig, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the ids that classes for fine-tuning look for, as the run has used them.

    Decoders classify by the last token that is not padding, and T5 by the last end of text. The
    tokenizer pads by its own settings, so both name the same padding.
    """
    if run.model.token_head or run.model.family == "bert":
        return {}
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


def _begun(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes with which token a run's documents begin, and returns the key of config.json."""
    if tokenizer.bos_token is None:
        return {}
    settings = folder / SETTINGS
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
