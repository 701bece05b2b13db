"""What cannot be converted is refused by name, and nothing is left behind."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.checkpoint.convert.importing import INDEX, WEIGHTS, import_folder
from gridformer.utils.errors import UserError
from tests.support.reference.folders import save, their_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A folder of two layers in several files."""
    folder = save(their_model("gpt2"), tmp_path_factory.mktemp("hf"), sharded=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(original: dict[str, bytes], tmp_path: Path) -> Path:
    there = tmp_path / "theirs"
    there.mkdir()
    for name, content in original.items():
        (there / name).write_bytes(content)
    return there


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def refusal(folder: Path) -> str:
    """Return the message with which an import is refused; it leaves nothing behind."""
    with pytest.raises(UserError) as raised:
        import_folder(folder, folder.parent / "run")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(raised.value)


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_missing_file_is_named(folder: Path) -> None:
    lost = shard(folder)
    lost.unlink()
    assert f"{lost} is missing" in refusal(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = shard(folder)
    os.truncate(path, path.stat().st_size - 100)
    assert f"{path} is truncated, damaged" in refusal(folder)


def test_tensors_that_are_missing_or_unknown_are_all_named(folder: Path) -> None:
    path = shard(folder)
    found = load_file(path)
    lost = min(found)
    found["transformer.h.0.attn.sink"] = found.pop(lost)
    save_file(found, path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["transformer.h.0.attn.sink"] = index["weight_map"].pop(lost)
    (folder / INDEX).write_text(json.dumps(index))
    told = refusal(folder)
    assert f"missing: {lost}" in told
    assert told.endswith("no counterpart of these tensors: transformer.h.0.attn.sink")


def test_a_shape_that_contradicts_the_config_is_named(folder: Path) -> None:
    changed(folder, lambda values: values.update(vocab_size=212))
    told = refusal(folder)
    assert (
        "transformer.wte.weight has the shape [211, 48], but by config.json it is [212, 48]" in told
    )


def test_an_index_cannot_lead_outside_its_folder(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    name = min(index["weight_map"])
    index["weight_map"][name] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert "names a file outside its folder" in refusal(folder)


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


def test_quantized_tensors_are_named(folder: Path) -> None:
    path = shard(folder)
    found = load_file(path)
    name = min(found)
    found[name] = found[name].to(torch.int8)
    save_file(found, path)
    assert f"{name} has the type I8" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"model_type": "mamba"}, "model_type=mamba is not supported: gridformer has gpt2"),
        ({"activation_function": "relu"}, "activation_function=relu: gridformer has only gelu_new"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false: gridformer has only true"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"n_head": 5}, "hidden_size=48 is not a multiple of n_heads=5"),
        ({"n_layer": "many"}, "n_layer=many is not a number"),
        ({"n_layer": 1.5}, "n_layers: "),
        ({"n_embd": {}}, "n_embd={} is not a number"),
        ({"n_embd": None}, "n_embd is missing"),
    ],
    ids=str,
)
def test_configs_are_refused_by_key_and_value(
    folder: Path, change: dict[str, Any], want: str
) -> None:
    changed(folder, lambda values: values.update(change))
    assert want in refusal(folder)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"num_attention_heads": {}}, "num_attention_heads={} is not a number"),
        ({"head_dim": [[]]}, "head_dim=[[]] is not a number"),
        ({"max_window_layers": "x"}, "max_window_layers=x is not a number"),
        ({"layer_types": 1e308}, "layer_types=1e+308 is not a list"),
        ({"layer_types": [{}]}, "layers of several kinds ({})"),
        ({"rope_parameters": {"rope_type": []}}, "rope_type=[]: gridformer has only default"),
        ({"architectures": 5, "id2label": 5}, "id2label=5 is not a mapping"),
    ],
    ids=str,
)
def test_values_of_other_types_are_refused_by_key(
    tmp_path: Path, change: dict[str, Any], want: str
) -> None:
    model = transformers.Qwen2ForSequenceClassification(their_model("qwen2").config)
    folder = save(model, tmp_path / "theirs")
    changed(folder, lambda values: values.update(use_sliding_window=True, layer_types=None))
    changed(folder, lambda values: values.update(change))
    assert want in refusal(folder)


def test_all_keys_are_refused_at_once(folder: Path) -> None:
    wrong = {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}
    changed(folder, lambda values: values.update(wrong))
    told = refusal(folder)
    assert all(key in told for key in wrong)


def test_gated_t5_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(their_model("t5"), tmp_path / "theirs")
    changed(folder, lambda values: values.update(feed_forward_proj="gated-gelu"))
    assert "feed_forward_proj=gated-gelu (as in T5 v1.1)" in refusal(folder)


REPEATED = [
    ("llama", {"tied_head": True}, "lm_head.weight", "model.embed_tokens.weight"),
    ("qwen2", {"tied_head": True}, "lm_head.weight", "model.embed_tokens.weight"),
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
    folder = save(their_model(kind, **changes), tmp_path / "theirs")
    found = load_file(folder / WEIGHTS)
    found[name] = found[other].clone()
    found[name][-1] += 0.5
    save_file(found, folder / WEIGHTS, {"format": "pt"})
    told = refusal(folder)
    assert f"{name} differs from {other}, and a {kind} has one of them" in told
    assert ("tie_word_embeddings: false" in told) == (kind in ("llama", "qwen2"))
    found[name] = found[other][:-1].clone()
    save_file(found, folder / WEIGHTS, {"format": "pt"})
    assert f"{name} differs from {other}" in refusal(folder)
    found[name] = found[other].double()
    save_file(found, folder / WEIGHTS, {"format": "pt"})
    import_folder(folder, tmp_path / "run")


def test_what_is_no_folder_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        import_folder(tmp_path / "meta-llama" / "x", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        import_folder(tmp_path / "empty", tmp_path / "run")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=f"has neither {WEIGHTS} nor"):
        import_folder(tmp_path / "empty", tmp_path / "run")


def test_existing_folders_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="already exists"):
        import_folder(folder, tmp_path / "run")
    import_folder(folder, tmp_path / "imported")
    with pytest.raises(UserError, match="already exists"):
        export_run(tmp_path / "imported", tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_no_run_resumes_from_imported_weights(folder: Path, tmp_path: Path) -> None:
    from gridformer.checkpoint import find
    from gridformer.checkpoint.manifest import read_manifest
    from gridformer.checkpoint.same_run import check_same_run

    done = import_folder(folder, tmp_path / "run")
    newest = find.newest(tmp_path / "run")
    with pytest.raises(UserError, match="holds weights without the state of an optimizer"):
        check_same_run(read_manifest(newest), done.run, newest)
