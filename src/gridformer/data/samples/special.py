"""Ids of special tokens: padding, masks, separators, sentinels."""

from __future__ import annotations

from dataclasses import dataclass

from gridformer.config import Family, Task
from gridformer.data.tokenizer import Tokenizer

# Their names in tokenizers, looked up in this order.
_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
# What families need besides the end-of-text token, whatever they learn; others need padding.
_WANTED: dict[Family, tuple[str, ...]] = {
    "bert": ("pad", "mask", "cls", "sep"),
    "gpt2": (),
    "llama": (),
}
_SENTINEL = "<extra_id_{}>"
SENTINELS = 100  # as in T5; more if a sample needs more


@dataclass(frozen=True)
class SpecialIds:
    """The special ids of one task and one tokenizer.

    A special token that the tokenizer has under a usual name keeps its id. The others get the ids
    after the tokenizer's vocabulary, in the order of the fields. Fields that the task does not use
    are None or empty.

    Attributes:
        eos: End of text.
        pad: Padding.
        mask: [MASK].
        cls: [CLS].
        sep: [SEP].
        start: The first token that a decoder reads.
        sentinels: One for each span of a sample.
        vocab_size: The size of the vocabulary, special ids included.
        ordinary_size: The size of the tokenizer's own vocabulary.
        not_words: Ids of the tokenizer's own vocabulary that are not words.
        begin: What a decoder reads before a text, such as Llama's begin-of-text token.
    """

    eos: int
    pad: int
    mask: int | None
    cls: int | None
    sep: int | None
    start: int
    sentinels: tuple[int, ...]
    vocab_size: int
    ordinary_size: int
    not_words: frozenset[int]
    begin: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, family: Family, task: Task, tokenizer: Tokenizer, n_sentinels: int = 0
    ) -> SpecialIds:
        """Returns the ids that `family` needs to learn `task`.

        The tasks causal and chat add no ids: padding, which labeled documents and conversations
        need, is the end-of-text token if the tokenizer has no padding. A decoder starts with
        padding in t5 and with the end-of-text token in transformer, as in the reference
        implementations.

        Args:
            family: The model's family.
            task: The task.
            tokenizer: The tokenizer.
            n_sentinels: How many sentinels the task spans needs; it gets at least 100.
        """
        size, eos = tokenizer.vocab_size, tokenizer.eos_id
        wanted = _WANTED.get(family, ("pad",))
        found: dict[str, int] = {}
        total = size
        for role in wanted:
            present = _first(tokenizer, _NAMES[role])
            if present is None:
                present, total = total, total + 1
            found[role] = present
        sentinels = []
        for number in range(max(SENTINELS, n_sentinels) if task == "spans" else 0):
            present = tokenizer.id_of(_SENTINEL.format(number))
            if present is None:
                present, total = total, total + 1
            sentinels.append(present)
        pad = found.get("pad", _first(tokenizer, _NAMES["pad"]))
        pad = eos if pad is None else pad
        return cls(
            eos=eos,
            pad=pad,
            mask=found.get("mask"),
            cls=found.get("cls"),
            sep=found.get("sep"),
            start=pad if family == "t5" else eos,
            sentinels=tuple(sentinels),
            vocab_size=total,
            ordinary_size=size,
            not_words=tokenizer.special_ids
            | {i for i in (eos, *found.values(), *sentinels) if i < size},
            begin=tuple(tokenizer.begin_ids) if family in ("gpt2", "llama") else (),
        )

    @property
    def added(self) -> list[str]:
        """The usual names of the ids after the tokenizer's own vocabulary, in their order."""
        named = {
            number: names[0]
            for role, names in _NAMES.items()
            if (number := getattr(self, role)) is not None
        }
        named |= {number: _SENTINEL.format(i) for i, number in enumerate(self.sentinels)}
        return [named[number] for number in range(self.ordinary_size, self.vocab_size)]

    def never(self, vocab_size: int) -> list[int]:
        """Returns the ids that generation must not produce: all but words and end of text."""
        others = {*self.not_words, *range(self.ordinary_size, vocab_size)}
        return sorted(others - {self.eos})


def _first(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    return next((i for name in names if (i := tokenizer.id_of(name)) is not None), None)
