"""What samples of all tasks share: their arrays, and the ids of special tokens in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridformer.config import Family, Task
from gridformer.data.tokenfolder import TokenSplit
from gridformer.data.tokenizer import Tokenizer

Arrays = dict[str, NDArray[Any]]
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
    "network": (),
}
_SENTINEL = "<extra_id_{}>"
SENTINELS = 100  # as in T5; more if a sample needs more


class Samples:
    """All samples of one split for one task."""

    n_samples: int
    n_left_out = 0  # pairs or conversations that no sample holds
    n_truncated = 0  # conversations of which a sample holds the beginning only
    n_held = 0  # tokens of all pairs or conversations in samples; the rest is padding
    n_positions = 0  # of a sample of pairs or conversations

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns one sample: the keys of `gridformer.utils.batch` without dimension b.

        All samples have the same shapes. Their numbers are in [0, n_samples).
        """
        raise NotImplementedError

    def read(
        self, numbers: NDArray[np.int64], draw: Callable[[int], np.random.Generator]
    ) -> Arrays:
        """Returns the samples of some numbers [b], with dimension b first.

        Args:
            draw: Returns the source of random choices of the sample at an index of `numbers`.
        """
        return stacked([self.sample(n, draw(i)) for i, n in enumerate(numbers.tolist())])


def stacked(samples: list[Arrays]) -> Arrays:
    """Returns samples of the same keys and shapes with a new dimension in front."""
    return {key: np.stack([one[key] for one in samples]) for key in samples[0]}


def padded(ids: NDArray[np.int64], length: int, value: int) -> NDArray[np.int64]:
    """Pads ids [n] with `value` to [length]; n <= length."""
    out = np.full(length, value, dtype=np.int64)
    out[: len(ids)] = ids
    return out


def first(n: int, length: int) -> NDArray[np.bool_]:
    """Returns a mask [length] whose first n elements are true."""
    return np.arange(length) < n


def more_text(split: TokenSplit) -> str:
    """Returns the remedy for a split that is too short, as the end of a sentence."""
    larger = "" if split.name == "train" else " or a larger --val-fraction"
    return f"prepare more text{larger}"


@dataclass(frozen=True)
class SpecialIds:
    """The special ids of one task and one tokenizer.

    A special token that the tokenizer has under a usual name keeps its id. The others get the ids
    after the tokenizer's vocabulary, in the order of the fields. Fields that the task does not use
    are None or empty.
    """

    eos: int
    pad: int
    mask: int | None
    cls: int | None
    sep: int | None
    start: int  # the first token that a decoder reads
    sentinels: tuple[int, ...]  # one for each span of a sample
    vocab_size: int
    ordinary_size: int  # of the tokenizer's own vocabulary
    not_words: frozenset[int]  # ids of the tokenizer's own vocabulary
    begin: tuple[int, ...] = ()  # what a decoder reads before a text, such as Llama's begin of text

    @classmethod
    def of(
        cls, family: Family, task: Task, tokenizer: Tokenizer, n_sentinels: int = 0
    ) -> SpecialIds:
        """Returns the ids that `family` needs to learn `task`, for spans at least 100 sentinels.

        The tasks causal and chat add no ids: padding, which labeled documents and conversations
        need, is the end-of-text token if the tokenizer has no padding. A decoder starts with
        padding in t5 and with the end-of-text token in transformer, as was published.
        """
        size, eos = tokenizer.vocab_size, tokenizer.eos_id
        total = size

        def own_or_new(names: tuple[str, ...]) -> int:
            nonlocal total
            if (own := _first(tokenizer, names)) is not None:
                return own
            total += 1
            return total - 1

        ids = {role: own_or_new(_NAMES[role]) for role in _WANTED.get(family, ("pad",))}
        n_sentinels = max(SENTINELS, n_sentinels) if task == "spans" else 0
        sentinels = [own_or_new((_SENTINEL.format(number),)) for number in range(n_sentinels)]
        pad = ids.get("pad", _first(tokenizer, _NAMES["pad"]))
        pad = eos if pad is None else pad
        return cls(
            eos=eos,
            pad=pad,
            mask=ids.get("mask"),
            cls=ids.get("cls"),
            sep=ids.get("sep"),
            start=pad if family == "t5" else eos,
            sentinels=tuple(sentinels),
            vocab_size=total,
            ordinary_size=size,
            not_words=tokenizer.special_ids
            | {i for i in (eos, *ids.values(), *sentinels) if i < size},
            begin=tuple(tokenizer.begin_ids) if family in ("gpt2", "llama", "network") else (),
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
