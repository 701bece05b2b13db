"""Training and loading tokenizers, and the round trip of any text."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, processors

from gridformer.data.tokenizer import EOS_NAMES, SMALLEST_VOCAB, Tokenizer
from gridformer.utils.errors import DataError, UserError
from tests.support.data import sentences

TRAINED = Tokenizer.train(sentences(200), 300)


@given(text=st.text())
@example("")
@example("\r\n\t x\0")
@example("naïve 🦊\u200d")
@example("a<|endoftext|>b")
def test_round_trip(text: str) -> None:
    """Lone surrogates become replacement characters."""
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert TRAINED.eos_id not in ids


def test_training_does_not_depend_on_the_order_of_the_texts(tmp_path: Path) -> None:
    texts = sentences(200)
    for name, order in (("a", texts), ("b", texts[::-1])):
        Tokenizer.train(iter(order), 350).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_vocabulary_sizes() -> None:
    assert TRAINED.vocab_size == 300
    assert Tokenizer.train([], 5000).vocab_size == SMALLEST_VOCAB
    with pytest.raises(UserError, match=r"vocab_size=256 .* use 257 or more"):
        Tokenizer.train([], 256)


def test_saved_and_loaded(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert (loaded.vocab_size, loaded.eos_id) == (300, TRAINED.eos_id)
        assert loaded.encode(sentences(1)[0]) == TRAINED.encode(sentences(1)[0])


def _word_level(path: Path, *words: str) -> tokenizers.Tokenizer:
    vocab = {word: number for number, word in enumerate(["a", "b", *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.save(str(path))
    return backend


def test_other_names_for_the_end_of_text(tmp_path: Path) -> None:
    for name in EOS_NAMES:
        _word_level(tmp_path / "t.json", "c", name)
        loaded = Tokenizer.load(tmp_path / "t.json")
        assert (loaded.eos_token, loaded.eos_id) == (name, 3)


def test_settings_of_others_neither_truncate_nor_add(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TRAINED._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "t.json"))
    text = sentences(1)[0]
    assert Tokenizer.load(tmp_path / "t.json").encode(text) == TRAINED.encode(text)


def test_files_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    _word_level(tmp_path / "t.json")
    for name, said in (
        ("gone.json", r"gone\.json: no such tokenizer file"),
        ("bad.json", r"bad\.json: is not a tokenizer\.json"),
        ("t.json", r"t.json: .* no end-of-text .* called <\|endoftext\|>"),
    ):
        with pytest.raises(DataError, match=said):
            Tokenizer.load(tmp_path / name)


_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_INSERT = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}
_CHAIN = {"type": "Sequence", "normalizers": 20 * [_DOUBLE, _INSERT]}
_STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 2**53}
_PUT = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "no", "type_id": 0}}]}
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "no unknown token": ("model.unk_token", "gone", "cannot encode a text .*Missing .* token"),
    "an id of 2^31": ("model.vocab.b", 2**31, "has the id 2147483648, and ids above 16777215"),
    "endless growth": ("normalizer", _CHAIN, "normalizer makes texts many times longer"),
    "a panic": ("decoder", _STRIP, "cannot decode tokens .*out of (bounds|range)"),
    "a foreign token": ("post_processor", _PUT | {"pair": [], "special_tokens": {}},
        "cannot encode"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    place, value, told = HOSTILE[name]
    _word_level(tmp_path / "t.json", "</s>")
    raw = json.loads((tmp_path / "t.json").read_text())
    *keys, last = place.split(".")
    raw["model"]["vocab"]["b"] = 99
    (tmp_path / "t.json").write_text(json.dumps(raw))
    assert Tokenizer.load(tmp_path / "t.json").vocab_size == 100, "ids may have holes"
    reduce(getitem, keys, raw)[last] = value
    (tmp_path / "t.json").write_text(json.dumps(raw))

    def use() -> str:
        loaded = Tokenizer.load(tmp_path / "t.json")
        return loaded.decode(loaded.begin_ids + loaded.encode("b a c"))

    with pytest.raises(DataError, match=f"t.json: .*{told}"):
        use()


def test_tokens_that_begin_and_end_documents(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<s>": 2, "<end>": 3}))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).eos_token == "</s>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert Tokenizer.load(tmp_path).eos_id == 3
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>", "bos_token": "<s>"}')
    usual = Tokenizer.load(tmp_path)
    assert (usual.eos_id, usual.bos_id, usual.begin_ids) == (1, None, [])
    with pytest.raises(DataError, match="has no token '<no>': use --eos with"):
        Tokenizer.load(tmp_path, "<no>")
    chosen = Tokenizer.load(tmp_path, "<end>", "<s>")
    (tmp_path / "saved").mkdir()
    chosen.save(tmp_path / "saved" / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "saved" / "tokenizer.json")
    assert (again.eos_id, again.bos_id, again.begin_ids) == (3, 2, [2])


def test_text_begins_with_the_chosen_token_and_not_the_tokenizers_own(tmp_path: Path) -> None:
    """Generation and evaluation must begin as the documents do on which a model was trained."""
    vocabulary = {"a": 0, "</s>": 1, "<s>": 2, "<d>": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.add_special_tokens(["</s>", "<s>", "<d>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).begin_ids == [2]
    assert Tokenizer.load(tmp_path, bos_token="<d>").begin_ids == [3]
