"""Prompts for models that fill in blanks or translate, and which tokens they must never produce.

The models are scripted: in each place they rank special tokens highest, and then the wanted word.
So an answer that contains a special token, or another place's word, is noticed.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import RunConfig, Task
from gridformer.data import SpecialIds, Tokenizer
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.generate import fill_spans, fill_words
from gridformer.evaluate.loading import Trained
from gridformer.models import Activations, Link, Model
from gridformer.utils.batch import Batch
from gridformer.utils.errors import UserError
from tests.support.data import sentences

# The tokenizer's vocabulary has at most 300 words, including the end of text; other special ids
# follow.
TOKENIZER = Tokenizer.train(sentences(50), 300)
SPACE = 16  # ids that the models have after all special ones
GREEDY, BEAMS = BeamSearch(beams=1, max_tokens=12), BeamSearch(beams=3, max_tokens=12)


def trained(model: nn.Module, special: SpecialIds, tokenizer: Tokenizer = TOKENIZER) -> Trained:
    one = Trained(cast(RunConfig, None), cast(Model, model), tokenizer)
    vars(one)["special"] = special
    return one


def one(text: str) -> int:
    """Return the id of a text that is one token."""
    (found,) = TOKENIZER.encode(text)
    return found


FOX, OVER, DOGS = one("fox"), one(" over"), one(" dogs")


def ranked(order: Sequence[int], v: int) -> Tensor:
    """Return logits [v] that rank the ids of `order` first, in that order."""
    logits = torch.full((v,), -50.0)
    logits[list(order)] = 50.0 - 2.0 * torch.arange(len(order))
    return logits


class Scripted(nn.Module):
    """A model whose hidden states are its logits."""

    keeps_keys = True

    def __init__(self, special: SpecialIds, **config: Any) -> None:
        super().__init__()
        self.special, self.v = special, special.vocab_size + SPACE
        self.config = SimpleNamespace(vocab_size=self.v, **config)
        self.loss = None
        self.weight = nn.Parameter(torch.zeros(1))

    def token_logits(self, hidden_BSH: Tensor) -> Tensor:
        return hidden_BSH


class ScriptedBERT(Scripted):
    """Ranks the special ids first, then the word for the number of [MASK] seen so far."""

    def __init__(self, special: SpecialIds, words: Sequence[int]) -> None:
        super().__init__(special, max_seq_len=32)
        self.words = words
        self.asked: list[int] = []

    def hidden(self, batch: Batch) -> Tensor:
        return self.ranks(batch["tokens"])

    def ranks(self, tokens_BS: Tensor) -> Tensor:
        (self.asked,) = tokens_BS.tolist()
        left, never = list(self.words), [*self.special.never(self.v), self.special.eos]
        wrong = one("the")
        rows = []
        for token in self.asked:
            word = left.pop(0) if token == self.special.mask else wrong
            rows.append(ranked([*never, word], self.v))
        return torch.stack(rows)[None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the quick brown ___ jumps", [FOX]),
        ("___ jumps___ the lazy___", [FOX, OVER, DOGS]),
        ("___", [OVER]),
    ],
)
def test_berts_blanks_hold_words_and_each_its_own(text: str, words: list[int]) -> None:
    special = SpecialIds.of("bert", "masked", TOKENIZER)
    model = ScriptedBERT(special, words)
    found = fill_words(trained(model, special), text)
    assert found == [TOKENIZER.decode([word]) for word in words]
    want: list[int] = [cast(int, special.cls)]
    for number, part in enumerate(text.split("___")):
        want += [cast(int, special.mask)] * (number > 0) + TOKENIZER.encode(part)
    assert model.asked == [*want, special.sep]


def test_special_tokens_within_the_vocabulary_are_no_words_either() -> None:
    """Use a tokenizer that has its own [MASK], [CLS], [SEP] and [PAD], and one more."""
    import tokenizers

    vocabulary = {word: i for i, word in enumerate(("unknown", "fox", "dogs"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="unknown"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]", "[SEP]", "[MASK]", "[PAD]", "[CLS]"])
    tokenizer = Tokenizer(backend, "words")
    special = SpecialIds.of("bert", "masked", tokenizer)
    assert special.ordinary_size == special.vocab_size == 8

    class Likes(ScriptedBERT):
        def ranks(self, tokens_BS: Tensor) -> Tensor:
            return ranked([3, 4, 5, 6, 7, 2], 8).expand(1, tokens_BS.shape[1], 8).clone()

    model = Likes(special, [])
    assert fill_words(trained(model, special, tokenizer), "fox ___") == ["dogs"]


def test_a_prompt_that_is_too_long_for_bert_is_refused() -> None:
    special = SpecialIds.of("bert", "masked", TOKENIZER)
    model = ScriptedBERT(special, [FOX])
    n = 3 + len(TOKENIZER.encode(" fox" * 40))
    with pytest.raises(UserError, match=rf"the prompt takes {n} tokens, and the model reads 32"):
        fill_words(trained(model, special), "___" + " fox" * 40)


class ScriptedDecoder(Scripted):
    """In each place, ranks forbidden tokens first, then the script's token, and at last the end."""

    def __init__(self, special: SpecialIds, bad: Sequence[int], script: Sequence[int]) -> None:
        super().__init__(special, n_layers=1, n_decoder_layers=1, two_stacks=True)
        self.bad, self.script = bad, [*script, special.eos]
        self.source: list[int] = []
        self.first: int | None = None

    def links(self) -> list[Link]:
        return []

    def run(self, batch: Batch, entering: Any, links: Any, caches: Any, start: int) -> Activations:
        tokens_BS = batch["tokens"]
        if self.first is None:
            self.first = int(tokens_BS[0, 0])
            (self.source,) = batch["source"].tolist()
        token = self.script[min(start, len(self.script) - 1)]
        logits = ranked([*self.bad, token], self.config.vocab_size)
        return Activations(logits.expand(len(tokens_BS), 1, -1).clone())


def t5(task: Task) -> SpecialIds:
    return SpecialIds.of("t5", task, TOKENIZER)


@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_t5s_blanks_hold_words_and_each_its_own(how: BeamSearch) -> None:
    """Padding and ids beyond the vocabulary are never produced; sentinels separate spans."""
    special = t5("spans")
    first, second, third = special.sentinels[:3]
    script = [first, FOX, DOGS, second, OVER, third]
    bad = [special.pad, special.vocab_size, special.vocab_size + SPACE - 1]
    model = ScriptedDecoder(special, bad, script)
    text = "the quick___ jumps___ the lazy dogs"
    (found,) = fill_spans(trained(model, special), [text], how)
    assert found == [TOKENIZER.decode([FOX, DOGS]), TOKENIZER.decode([OVER])]
    a, b, c = (TOKENIZER.encode(part) for part in text.split("___"))
    assert model.source == [*a, first, *b, second, *c, special.eos]
    assert model.first == special.start == special.pad


@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["t5", "transformer"])
def test_a_translation_holds_words_alone(family: str, how: BeamSearch) -> None:
    special = SpecialIds.of("t5" if family == "t5" else "transformer", "pairs", TOKENIZER)
    bad = [special.pad, special.vocab_size, special.vocab_size + SPACE - 1]
    model = ScriptedDecoder(special, bad, [FOX, OVER, DOGS])
    (said,) = translate(trained(model, special), ["the lazy dogs"], how)
    assert said == TOKENIZER.decode([FOX, OVER, DOGS])
    assert model.source == [*TOKENIZER.encode("the lazy dogs"), special.eos]
    assert model.first == (special.pad if family == "t5" else special.eos)


def test_a_blank_of_which_nothing_is_said_is_empty() -> None:
    special = t5("spans")
    model = ScriptedDecoder(special, [], [special.sentinels[1], OVER])
    (found,) = fill_spans(trained(model, special), ["a___b___c"], GREEDY)
    assert found == ["", TOKENIZER.decode([OVER])]
