"""What cannot be converted is refused by name, and nothing is left behind."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gridformer.checkpoint import find
from gridformer.checkpoint.checkpoint import check_same_run
from gridformer.checkpoint.convert.exporting import export_run
from gridformer.checkpoint.convert.importing import INDEX, WEIGHTS, import_folder
from gridformer.checkpoint.manifest import read_manifest
from gridformer.utils.errors import UserError
from tests.support.reference.folders import save
from tests.support.reference.shared import pair


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two layers in several files."""
    return save(pair("gpt2")[1], tmp_path_factory.mktemp("hf"), sharded=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "theirs"))


def refusal(folder: Path) -> str:
    """Return the message with which an import is refused; it leaves nothing behind."""
    with pytest.raises(UserError) as raised:
        import_folder(folder, folder.parent / "run")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(raised.value)


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def changed(folder: Path, change: Callable[[Any], Any], name: str = "config.json") -> None:
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))


def renamed(folder: Path) -> None:
    tensors = load_file(shard(folder))
    name, other = min(tensors), "transformer.h.0.attn.sink"
    tensors[other] = tensors.pop(name)
    save_file(tensors, shard(folder))
    changed(folder, lambda index: index["weight_map"].update({other: shard(folder).name}), INDEX)
    changed(folder, lambda index: index["weight_map"].pop(name), INDEX)


def to_int8(folder: Path) -> None:
    tensors = load_file(shard(folder))
    name = min(tensors)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, shard(folder))


def outside(index: dict[str, Any]) -> None:
    index["weight_map"][min(index["weight_map"])] = "../elsewhere.safetensors"


def of_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: changed(folder, lambda config: config.update(values))


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a missing file": (lambda folder: shard(folder).unlink(), ["{shard} is missing"]),
    "a truncated file": (
        lambda folder: os.truncate(shard(folder), shard(folder).stat().st_size - 100),
        ["{shard} is truncated, damaged"],
    ),
    "tensors that are missing and unknown": (
        renamed,
        [
            "these tensors are missing: {first}",
            "no counterpart of these tensors: transformer.h.0.attn.sink",
        ],
    ),
    "a shape that contradicts the config": (of_config(vocab_size=212),
        ["transformer.wte.weight has the shape [211, 48], but by config.json it is [212, 48]"]),
    "an index that leads outside": (lambda folder: changed(folder, outside, INDEX),
        ["names a file outside its folder"]),
    "quantized tensors": (to_int8, ["{first} has the type I8"]),
    "another kind": (of_config(model_type="mamba"),
        ["model_type=mamba is not supported: gridformer has gpt2"]),
    "no model": (of_config(n_head=5), ["hidden_size=48 is not a multiple of n_heads=5"]),
    "half a layer": (of_config(n_layer=1.5), ["n_layers: "]),
    "several keys": (of_config(activation_function="relu", n_embd=None),
        ["activation_function=relu: gridformer has only gelu_new", "n_embd is missing"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(folder: Path, damage: str) -> None:
    function, told = DAMAGES[damage]
    path, first = shard(folder), min(load_file(shard(folder)))
    function(folder)
    said = refusal(folder)
    for text in told:
        assert text.format(shard=path, first=first) in said


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_lines_that_convert_them(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder.parent / "ran"),)

    (folder / name).write_bytes(pickle.dumps(Bomb()))
    told = refusal(folder)  # which also finds no folder that the pickle would have made
    assert name in told
    assert f'GPT2LMHeadModel.from_pretrained("{folder}").save_pretrained(' in told
    changed(folder, lambda values: values.update(architectures=5))
    assert "from transformers import AutoModelForCausalLM" in refusal(folder)


REPEATED = [
    ("llama", {"tied_head": True}, "lm_head.weight", "model.embed_tokens.weight"),
    ("gpt2", {}, "lm_head.weight", "transformer.wte.weight"),
    ("t5", {}, "lm_head.weight", "shared.weight"),
    ("t5", {}, "encoder.embed_tokens.weight", "shared.weight"),
    ("bert", {}, "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("bert", {}, "cls.predictions.decoder.bias", "cls.predictions.bias"),
]


@pytest.mark.parametrize(("kind", "changes", "name", "other"), REPEATED)
def test_a_tensor_that_should_repeat_another_and_differs(
    kind: str, changes: dict[str, Any], name: str, other: str, tmp_path: Path
) -> None:
    """transformers does not tie such tensors; a copy, of a wider type perhaps, is skipped."""
    folder = save(pair(kind, **changes)[1], tmp_path / "theirs")
    tensors = load_file(folder / WEIGHTS)
    wrong = tensors[other].clone()
    wrong[-1] += 0.5
    for tensor, why in ((wrong, f", and a {kind} has one"), (tensors[other][:-1].clone(), "")):
        save_file({**tensors, name: tensor}, folder / WEIGHTS, {"format": "pt"})
        told = refusal(folder)
        assert f"{name} differs from {other}{why}" in told
        assert ("tie_word_embeddings: false" in told) == (kind == "llama")
    save_file({**tensors, name: tensors[other].double()}, folder / WEIGHTS, {"format": "pt"})
    import_folder(folder, tmp_path / "run")


def test_what_is_no_folder_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        import_folder(tmp_path / "meta-llama" / "x", tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json, so it is not a folder of Hugging Face" in refusal(empty)
    (empty / "config.json").write_text('{"model_type": "gpt2"}')
    assert f"has neither {WEIGHTS} nor" in refusal(empty)


def test_existing_folders_are_not_replaced_and_imports_not_resumed(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="already exists"):
        import_folder(folder, tmp_path / "run")
    done = import_folder(folder, tmp_path / "imported")
    with pytest.raises(UserError, match="already exists"):
        export_run(tmp_path / "imported", tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    newest = find.newest(tmp_path / "imported")
    with pytest.raises(UserError, match="holds weights without the state of an optimizer"):
        check_same_run(read_manifest(newest), done.run, newest)
