"""Models of Hugging Face compute the same here, and come back bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.convert.exporting import export_run, write_tokenizer
from gridformer.checkpoint.convert.importing import INDEX, import_folder
from gridformer.checkpoint.whole import shapes_of
from gridformer.config.model import RopeScaling
from gridformer.data import Tokenizer, special_ids
from gridformer.data.samples.masked import MaskedSamples
from gridformer.data.samples.sample import SpecialIds
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.loading import load_model
from gridformer.utils.errors import ConfigError
from tests.support.data import counting_split
from tests.support.marks import full_unless
from tests.support.reference import folders
from tests.support.reference.shared import (
    CONFIGS,
    MIXTURES,
    assert_close,
    entries_of,
    pair,
    to_ours,
    transformers,
)

# All forms, heads that are tied and untied, and mixtures with each kind of names.
QUICK = ("gpt2", "bert", "llama", "qwen2", "mixtral", "dots1")


def tensors(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


# Kinds are told apart by what they have; a Mistral without a window remains one.
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=8)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in (*CONFIGS, *MIXTURES)),
    ("qwen3_moe", {"balance_loss": 0.02, "normalized_gates": False}),
    ("qwen3", {"tied_head": True, "head_dim": 16, "window": 7}),
    ("llama", {"n_kv_heads": 4, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ("mistral", {"window": 0, "rope_scaling": YARN}),
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    full_unless(lambda case: case[0] in QUICK or bool(case[1]), CASES, unpack=True),
)
def test_there_and_back(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Import from shards, export in shards, open there, and import again."""
    theirs = pair(kind, **changes)[1]
    folder = folders.save(theirs, tmp_path / "theirs", sharded=True)
    assert (folder / INDEX).is_file()
    done = import_folder(folder, tmp_path / "run")
    assert done.model_type == kind
    for key, value in changes.items():
        assert key == "n_kv_heads" or getattr(done.run.model, key) == value
    model = folders.ours(tmp_path / "run")
    assert_close(folders.our_logits(model), folders.their_logits(theirs, model))

    back = tmp_path / "back"
    told = export_run(tmp_path / "run", back, shard_gib=40e3 / 2**30)
    assert told.n_files == len(list(back.glob("*.safetensors"))) > 1
    same_bits(tensors(back), tensors(folder))
    again = folders.opened_by_them(back)
    assert type(again) is type(theirs)
    same_bits(dict(again.named_parameters()), dict(theirs.named_parameters()))
    assert_close(folders.their_logits(again, model), folders.their_logits(theirs, model))

    import_folder(back, tmp_path / "second")
    same_bits(*(tensors(find.newest(tmp_path / name)) for name in ("second", "run")))


@pytest.mark.parametrize("kind", [*CONFIGS, *MIXTURES])
def test_tables_are_complete(kind: str) -> None:
    """Every parameter of ours is in the table once, and every form undoes itself."""
    model, _ = pair(kind)
    entries = entries_of(model.config, kind)
    assert [entry.ours for entry in entries] == list(dict.fromkeys(e.ours for e in entries))
    assert {entry.ours for entry in entries} == set(shapes_of(model.config))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    theirs = {
        name: tensor
        for entry in entries
        for name, tensor in zip(entry.theirs, entry.form.theirs(weights[entry.ours]))
    }
    same_bits(to_ours(entries, theirs), weights)


TYPES = [("bfloat16", "keep"), ("float16", "float32"), ("float32", "bfloat16")]


@pytest.mark.parametrize(("stored", "dtype"), TYPES)
def test_types_are_kept_or_converted(stored: str, dtype: Any, tmp_path: Path) -> None:
    want = getattr(torch, stored if dtype == "keep" else dtype)
    folder = folders.save(pair("gpt2")[1].to(getattr(torch, stored)), tmp_path / "theirs")
    import_folder(folder, tmp_path / "run", dtype)
    export_run(tmp_path / "run", tmp_path / "back")
    converted = {name: value.to(want) for name, value in tensors(folder).items()}
    same_bits(tensors(tmp_path / "back"), converted)
    assert folders.opened_by_them(tmp_path / "back").dtype == want


def test_names_of_a_bare_model_and_harmless_buffers_are_understood(tmp_path: Path) -> None:
    """The published GPT-2 files have no `transformer.` before names, and hold masks."""
    theirs = pair("gpt2")[1]
    folder = folders.save(theirs, tmp_path / "theirs")
    bare = {name.removeprefix("transformer."): value for name, value in tensors(folder).items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(3)}
    save_file(bare, folder / "model.safetensors")
    import_folder(folder, tmp_path / "run")
    model = folders.ours(tmp_path / "run")
    assert_close(folders.our_logits(model), folders.their_logits(theirs, model))


def test_bert_without_the_pair_branch(tmp_path: Path) -> None:
    folders.save(transformers.BertForMaskedLM(pair("bert")[1].config), tmp_path / "theirs")
    done = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not done.run.model.sentence_pair
    assert export_run(tmp_path / "run", tmp_path / "back").architecture == "BertForMaskedLM"
    same_bits(tensors(tmp_path / "back"), tensors(tmp_path / "theirs"))


def test_a_sentence_that_follows_is_their_label_0(tmp_path: Path) -> None:
    """Their documentation says that label 0 of a sentence pair means that B follows A.

    The samples are ours, of a text in which token i is i, so that they show whether B follows.
    """
    theirs = pair("bert")[1]
    import_folder(folders.save(theirs, tmp_path / "theirs"), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    split = counting_split(200)
    special = SpecialIds(0, 200, 201, 202, 203, 0, (), 204, 200, frozenset())
    samples = MaskedSamples(split, 24, special, sentence_pair=True)
    read = [samples.sample(i % 9, np.random.default_rng(i)) for i in range(16)]
    batch = {key: torch.from_numpy(np.stack([one[key] for one in read])) for key in read[0]}
    label = []
    for tokens, targets, b in zip(batch["tokens"], batch["targets"], batch["segments"].bool()):
        text = torch.where(targets < 0, tokens, targets)
        first_of_b = int(b.nonzero()[0])
        label.append(int(text[first_of_b] != text[first_of_b - 2] + 1))
    assert {*label} == {0, 1}
    model = folders.ours(tmp_path / "run")
    given = {"input_ids": batch["tokens"], "token_type_ids": batch["segments"]}
    with torch.no_grad():
        got = model.losses(batch)["pair"] / 16
        for source in ("theirs", "back"):
            them = transformers.BertForNextSentencePrediction.from_pretrained(tmp_path / source)
            assert_close(got, them.eval()(**given, labels=torch.tensor(label)).loss)


def test_token_ids_and_tokenizer_come_back(tmp_path: Path) -> None:
    theirs = pair("gpt2")[1]
    theirs.config.eos_token_id = 0
    folder = folders.save(theirs, tmp_path / "theirs")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize(("family", "task"), [("bert", "masked"), ("t5", "spans")])
def test_special_tokens_of_a_run_are_added_to_its_tokenizer(
    family: Any, task: Any, tmp_path: Path
) -> None:
    """They have the ids that the run gave them: the first ones after the tokenizer's words."""
    folders.tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = pair(family)[1]
    folders.save(model, tmp_path / "theirs")
    made = import_folder(tmp_path / "theirs", tmp_path / "made").run
    (tmp_path / "out").mkdir()
    ids = write_tokenizer(tmp_path / "out", tmp_path, made)
    special = special_ids(made, Tokenizer.load(tmp_path / "tokenizer.json"))
    assert made.task == task
    assert special.vocab_size > special.ordinary_size
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(loaded) == special.vocab_size
    assert (loaded.eos_token_id, loaded.pad_token_id) == (special.eos, special.pad)
    assert ids["pad_token_id"] == special.pad
    if family == "bert":
        assert loaded.mask_token_id == special.mask
        assert loaded("a [MASK] b").input_ids.count(special.mask) == 1
    else:
        assert loaded.convert_tokens_to_ids("<extra_id_7>") == special.sentinels[7]
        assert ids["decoder_start_token_id"] == special.start


def test_a_t5_comes_back_with_what_it_has_learned(tmp_path: Path) -> None:
    """An export says so, and the user of a folder from elsewhere."""
    theirs = folders.save(pair("t5")[1], tmp_path / "theirs")
    assert import_folder(theirs, tmp_path / "plain").run.task == "spans"
    export_run(tmp_path / "plain", tmp_path / "spans")
    assert "gridformer_task" not in json.loads((tmp_path / "spans" / "config.json").read_text())
    assert import_folder(theirs, tmp_path / "pairs", task="pairs").run.task == "pairs"
    export_run(tmp_path / "pairs", tmp_path / "back")
    assert import_folder(tmp_path / "back", tmp_path / "again").run.task == "pairs"
    assert import_folder(tmp_path / "back", tmp_path / "other", task="spans").run.task == "spans"
    folders.opened_by_them(tmp_path / "back")
    trained = load_model(tmp_path / "again", torch.device("cpu"))
    (text,) = translate(trained, ["ab"], BeamSearch(max_tokens=4))
    assert isinstance(text, str)


def test_a_task_that_a_model_cannot_have_learned(tmp_path: Path) -> None:
    theirs = folders.save(pair("t5")[1], tmp_path / "theirs")
    with pytest.raises(
        ConfigError, match="--task chat: a t5 with a head of tokens learns spans or"
    ):
        import_folder(theirs, tmp_path / "run", task="chat")
    config = pair("gpt2")[1].config
    config.pad_token_id = 0
    theirs = folders.save(transformers.GPT2ForSequenceClassification(config), tmp_path / "labels")
    with pytest.raises(ConfigError, match="--task causal: its head says that it has learned class"):
        import_folder(theirs, tmp_path / "run", task="causal")
    assert not (tmp_path / "run").exists()
