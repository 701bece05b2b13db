"""A thin wrapper around `tokenizers.Tokenizer`: train or load, encode, decode, end of text."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import UnreadableError, read_json, read_text
from gridformer.utils.units import GIB, MOST_IDS

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token, looked up in this order when a tokenizer is loaded.
EOS_NAMES = (END_OF_TEXT, "</s>", "[SEP]", "<eos>", "<|end_of_text|>")
SETTINGS = "tokenizer_config.json"
BEGINS = "gridformer_begins_documents"  # in SETTINGS: whether bos_token begins each document
SMALLEST_VOCAB = 257  # the 256 bytes, which can encode any text, and the end-of-text token


class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
        bos_token: The token with which every document begins, if there is one.
        special_ids: `eos_id` and the ids of all other tokens that the tokenizer declares special.
        origin: A phrase for people that tells where the tokenizer comes from.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        origin: str,
        eos_token: str | None = None,
        bos_token: str | None = None,
    ) -> None:
        # A tokenizer.json may carry settings for fine-tuning; truncation would lose text silently.
        backend.no_truncation()
        backend.no_padding()
        # A document that contains "<|endoftext|>" as text gets ordinary tokens, not a boundary.
        backend.encode_special_tokens = True
        self._backend = backend
        self.origin = origin
        vocab = backend.get_vocab()
        if not vocab:
            raise DataError(f"{origin}: the tokenizer's vocabulary is empty")
        # Ids may have holes, so the number of entries is not enough.
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(
                f"{origin}: the tokenizer has the id {self.vocab_size - 1}, and ids above "
                f"{MOST_IDS - 1} would need too much memory: number its tokens from 0 on"
            )
        _check_growth(backend.normalizer, origin)
        added = backend.get_added_tokens_decoder().items()
        for option, name in (("--eos", eos_token), ("--bos", bos_token)):
            if name is not None and name not in vocab:
                special = [t.content for _, t in added if t.special][:8]
                there = f"one of {', '.join(special)}" if special else "a token of its vocabulary"
                raise DataError(
                    f"{origin}: the tokenizer has no token '{name[:80]}': use {option} with {there}"
                )
        ends = eos_token or next((name for name in EOS_NAMES if name in vocab), None)
        if ends is None:
            raise DataError(
                f"{origin}: the tokenizer has no end-of-text token: name one of its tokens with "
                f"--eos, or add a special token called {END_OF_TEXT} to its vocabulary (also "
                f"accepted: {', '.join(EOS_NAMES[1:])})"
            )
        self.eos_token = ends
        self.eos_id: int = vocab[ends]
        self.bos_token = bos_token
        self.bos_id: int | None = None if bos_token is None else vocab[bos_token]
        self.special_ids = frozenset({self.eos_id, *(i for i, t in added if t.special)})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Trains a byte-level BPE like GPT-2's, of at most vocab_size tokens."""
        if vocab_size < SMALLEST_VOCAB:
            raise UserError(
                f"vocab_size={vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}: use "
                f"{SMALLEST_VOCAB} or more"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(iter(texts), trainer)
        return cls(backend, "byte-level BPE trained on this corpus")

    @classmethod
    def load(
        cls, path: Path | str, eos_token: str | None = None, bos_token: str | None = None
    ) -> Self:
        """Loads a tokenizer.json, or the one in a folder.

        A tokenizer_config.json beside it says which token ends documents, unless `eos_token` does.
        A token with which documents begin is taken from there only if `save` wrote it.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"{file}: no such tokenizer file; give the path of a tokenizer.json")
        with _library(f"{file}: is not a tokenizer.json"):
            backend = tokenizers.Tokenizer.from_str(read_text(file, GIB))
        settings = _settings(file.with_name(SETTINGS))
        said = spelled(settings.get("eos_token"))
        if eos_token is None and said is not None and backend.token_to_id(said) is not None:
            eos_token = said
        if bos_token is None and settings.get(BEGINS) is True:
            bos_token = spelled(settings.get("bos_token"))
        return cls(backend, str(path), eos_token, bos_token)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what the tokenizer is made from, because the library loses some settings."""
        return _from_json, (self.to_json(), self.origin, self.eos_token, self.bos_token)

    def to_json(self) -> str:
        """Returns the content of a tokenizer.json."""
        return str(self._backend.to_str())

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, added ones included."""
        return dict(self._backend.get_vocab())

    def same_ids(self, other: Tokenizer) -> bool:
        """Returns whether another tokenizer has the same vocabulary and end of text."""
        return self.eos_id == other.eos_id and self.vocabulary == other.vocabulary

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token spelled as in the vocabulary, or None if it is not there."""
        number = self._backend.token_to_id(token)
        return None if number is None else int(number)

    def token_of(self, number: int) -> str | None:
        """Returns the token of an id, or None if it has none."""
        token = self._backend.id_to_token(number) if 0 <= number < self.vocab_size else None
        return None if token is None else str(token)

    def add_special(self, tokens: Sequence[str]) -> None:
        """Adds special tokens, which get the ids after the vocabulary, in their order."""
        self._backend.add_special_tokens(list(tokens))
        vocab = self._backend.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.special_ids |= {vocab[token] for token in tokens}

    def put_around(self, one: Sequence[str], two: Sequence[str]) -> None:
        """Makes other programs put special tokens around texts, unless the tokenizer does already.

        Args:
            one: The special tokens around a text, which is `$A`.
            two: Those around two texts, `$A` and `$B`, with `:1` behind what has the segment 1.
        """
        vocab = self._backend.get_vocab()
        names = sorted({piece.removesuffix(":1") for piece in (*one, *two)} - {"$A", "$B"})
        puts_some = self._backend.num_special_tokens_to_add(False)
        # What the library takes for a part of its own notation cannot be written there.
        if puts_some or not names or any(":" in name or name.startswith("$") for name in names):
            return
        added: Any = processors.TemplateProcessing(
            single=list(one), pair=list(two), special_tokens=[(name, vocab[name]) for name in names]
        )
        if (before := self._backend.post_processor) is not None:
            added = processors.Sequence([before, added])
        self._backend.post_processor = added

    @cached_property
    def begin_ids(self) -> list[int]:
        """The ids before a text: `bos_token`, or else what the tokenizer itself puts there.

        `encode` leaves all of them out, because texts of a corpus follow one another.
        """
        if self.bos_id is not None:
            return [self.bos_id]
        bare, whole = (self._encode(["a"], special)[0].ids for special in (False, True))
        places = range(len(whole) - len(bare) + 1)
        n = next((i for i in places if whole[i : i + len(bare)] == bare), 0)
        return [int(i) for i in whole[:n]]

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json, which `load` and transformers can read.

        A tokenizer_config.json beside it names tokens of documents that are not the usual ones.
        """
        self._backend.save(str(path))
        usual = next((name for name in EOS_NAMES if self.id_of(name) is not None), None)
        if (self.eos_token, self.bos_token) != (usual, None):
            settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
            settings["eos_token"] = self.eos_token
            if self.bos_token is not None:
                settings |= {"bos_token": self.bos_token, BEGINS: True}
            text = json.dumps(settings, indent=2, ensure_ascii=False)
            path.with_name(SETTINGS).write_text(text + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without adding special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of several texts, which are encoded in parallel threads."""
        return [e.ids for e in self._encode(texts)]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Does what `encode_with_offsets` does, but takes special tokens that are spelled out."""
        self._backend.encode_special_tokens = False
        try:
            return self.encode_with_offsets(texts)
        finally:
            self._backend.encode_special_tokens = True

    @property
    def special_tokens(self) -> frozenset[str]:
        """The spellings of all special tokens, which `encode` takes for ordinary text."""
        return frozenset(name for i in self.special_ids if (name := self.token_of(i)))

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns the ids of several texts, and the characters (begin, end) of each token."""
        return [(e.ids, e.offsets) for e in self._encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids, special tokens included."""
        with _library(f"{self.origin}: the tokenizer cannot decode tokens"):
            return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _encode(self, texts: Sequence[str], special: bool = False) -> list[tokenizers.Encoding]:
        clean = [encodable(text) for text in texts]
        with _library(f"{self.origin}: the tokenizer cannot encode a text"):
            return self._backend.encode_batch(clean, add_special_tokens=special)


def _from_json(text: str, *more: Any) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(text), *more)


@contextmanager
def _library(told: str) -> Iterator[None]:
    """Raises DataError where the library fails: it raises bare Exceptions, and panics."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class has no public name
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise DataError(f"{told} ({reason})") from None


def _check_growth(normalizer: Any, origin: str) -> None:
    """Refuses a normalizer that makes texts much longer, which would need any amount of memory."""
    text = string.printable
    for step in _steps(normalizer):  # one by one, because each may double the text
        with _library(f"{origin}: the tokenizer's normalizer fails"):
            text = step.normalize_str(text)
        if len(text) > 4 * len(string.printable):
            raise DataError(f"{origin}: the tokenizer's normalizer makes texts many times longer")


def _steps(normalizer: Any) -> list[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        return [step for i in range(len(normalizer)) for step in _steps(normalizer[i])]
    return [] if normalizer is None else [normalizer]


def _settings(file: Path) -> dict[str, Any]:
    """Returns the content of a tokenizer_config.json, or nothing if it cannot be read."""
    try:
        settings = read_json(file)
    except UnreadableError:
        return {}
    return settings if isinstance(settings, dict) else {}


def spelled(token: object) -> str | None:
    """Returns how a token of a tokenizer_config.json is spelled; some are written with settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def encodable(text: str) -> str:
    """Replaces lone surrogates in a text, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
