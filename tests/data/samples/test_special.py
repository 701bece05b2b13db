"""Special ids: the tokenizer's own if it has them, and otherwise new ones after its vocabulary."""

import tokenizers
from tokenizers import models

from gridformer.data.samples.sample import SENTINELS, SpecialIds
from gridformer.data.tokenizer import Tokenizer
from tests.support.data import sentences

BYTES = Tokenizer.train(sentences(50), 300)


def words(*special: str) -> Tokenizer:
    """Return a tokenizer with ten words, followed by special tokens."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0")
    )
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, "words")


def test_new_ids_come_behind_the_vocabulary_in_a_fixed_order() -> None:
    ids = SpecialIds.of("bert", "masked", BYTES)
    assert (ids.pad, ids.mask, ids.cls, ids.sep) == (300, 301, 302, 303)
    assert (ids.vocab_size, ids.ordinary_size) == (304, 300)
    assert ids.eos == BYTES.eos_id
    assert ids.not_words == {BYTES.eos_id}
    assert ids.sentinels == ()


def test_the_tokenizers_own_are_used() -> None:
    bert = words("[UNK]", "[SEP]", "[MASK]", "[PAD]", "[CLS]")
    ids = SpecialIds.of("bert", "masked", bert)
    assert (ids.sep, ids.mask, ids.pad, ids.cls) == (11, 12, 13, 14)
    assert ids.vocab_size == ids.ordinary_size == 15
    assert ids.not_words == {10, 11, 12, 13, 14}
    roberta = SpecialIds.of("bert", "masked", words("<s>", "</s>", "<mask>"))
    assert (roberta.cls, roberta.sep, roberta.mask, roberta.pad) == (10, 11, 12, 13)
    assert roberta.eos == roberta.sep
    assert roberta.vocab_size == 14


def test_causal_adds_nothing() -> None:
    ids = SpecialIds.of("gpt2", "causal", BYTES)
    assert ids.vocab_size == 300
    assert ids.pad == ids.eos
    assert SpecialIds.of("gpt2", "causal", words("</s>", "<pad>")).pad == 11


def test_decoders_start_as_published() -> None:
    t5 = SpecialIds.of("t5", "pairs", BYTES)
    assert t5.start == t5.pad == 300
    transformer = SpecialIds.of("transformer", "pairs", BYTES)
    assert transformer.start == transformer.eos
    assert transformer.vocab_size == 301


def test_sentinels() -> None:
    ids = SpecialIds.of("t5", "spans", BYTES, n_sentinels=3)
    assert ids.sentinels == tuple(range(301, 301 + SENTINELS))
    assert ids.vocab_size == 401
    many = SpecialIds.of("t5", "spans", BYTES, n_sentinels=150)
    assert len(set(many.sentinels)) == 150
    # T5's own sentinels are in reverse order; missing ones follow the vocabulary.
    own = SpecialIds.of("t5", "spans", words("</s>", "<pad>", "<extra_id_1>", "<extra_id_0>"))
    assert own.sentinels[:3] == (13, 12, 14)
    assert own.vocab_size == 14 + 98
