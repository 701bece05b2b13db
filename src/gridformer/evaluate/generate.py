"""Generates text with a checkpoint of any layout: continues, translates or fills in blanks."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.data import Tokenizer
from gridformer.evaluate.beams import BeamSearch, search_in_batches, translate
from gridformer.evaluate.continuing import MOST_SEED, Prompt, Sampling, Speed, continue_texts
from gridformer.evaluate.decoding import whole_logits
from gridformer.evaluate.loading import Job, Trained
from gridformer.evaluate.scoring import in_batches
from gridformer.models import BERT
from gridformer.utils.batch import Batch
from gridformer.utils.errors import ConfigError, UserError

BLANK = "___"  # three underscores
_TOKENS_BEFORE = 8  # as many as may belong to one character or word, and some more


@dataclass(frozen=True)
class Generation:
    """Settings of a generation.

    Attributes:
        sampling: For models that continue texts.
        search: For encoder-decoders. `max_tokens` applies to all models.
        batch_size: Prompts of about equal length that go through the model together.
        stops: Of prompts that a chat template has rendered, in which special tokens are spelled
            out: the ids of tokens that end an answer. None means plain prompts.
        speed: Counts tokens and seconds of models that continue texts.
    """

    sampling: Sampling = field(default_factory=Sampling)
    search: BeamSearch = field(default_factory=BeamSearch)
    batch_size: int = 16
    stops: frozenset[int] | None = None
    speed: Speed = field(default_factory=Speed)


def check_options(model: ModelConfig, given: Sequence[str], chat: bool = False) -> None:
    """Checks that a model uses all options that were given: fields of `Sampling` and `BeamSearch`.

    Raises:
        ConfigError: The family of the model does not use one of the options, or a chat.
    """
    if not model.token_head:
        raise ConfigError(
            "this model was fine-tuned and predicts no tokens: use gridformer evaluate"
        )
    this, samples = f"this model is a {model.family}", continues(model)
    problems = [f"--chat is for gpt2 and llama, and {this}: leave it out"] * (chat and not samples)
    kinds = {
        True: "is for gpt2 and llama, which sample tokens",
        False: "is for t5 and transformer, which use beam search",
    }
    use = "leave it out"
    if samples:
        use = "use --temperature, --top-k and --top-p, or leave it out"
    elif model.two_stacks:
        use = "use --beams and --length-penalty, or leave it out"
    of_sampling = {field.name for field in fields(Sampling)}
    problems += [
        f"--{name.replace('_', '-')} {kinds[name in of_sampling]}; {this}: {use}"
        for name in given
        if not (samples if name in of_sampling else model.two_stacks)
    ]
    if problems:
        raise ConfigError(*problems)


def continues(model: ModelConfig) -> bool:
    """Returns whether a model continues texts."""
    return not model.two_stacks and model.family != "bert" and model.token_head


def answer(trained: Trained, prompt: str, how: Generation) -> Iterator[str]:
    """Yields the output of a model for a prompt in pieces of text.

    For gpt2 and llama it is the prompt, unless it is a chat, and its continuation. For bert, and
    for t5 trained on spans, it is the prompt with its blanks filled in. For t5 and transformer
    trained on pairs, it is the second text of the pair. ___ marks a blank.

    Raises:
        UserError: Blanks are missing, or the prompt is too long; see `fill_words` and `fill_spans`.
    """
    if not continues(trained.model.config):
        yield from answers(trained, [prompt], how)
        return
    if how.stops is None:
        yield prompt
    yield from stream(trained, prompt, how)


def answers(trained: Trained, prompts: Sequence[str], how: Generation) -> Iterator[str]:
    """Yields the output of a model for each of many prompts: the continuations of gpt2 and llama.

    All processes call it together. `how.batch_size` prompts go through the model at a time, those
    of bert one after the other. Prompt i, counted from 0, is continued as it is alone with the seed
    `how.sampling.seed` + i.
    """
    if isinstance(trained.model, BERT):
        yield from (_filled(prompt, fill_words(trained, prompt)) for prompt in prompts)
    elif not trained.model.config.two_stacks:
        yield from continue_prompts(trained, prompts, how)
    elif trained.run.task == "spans":
        yield from map(_filled, prompts, fill_spans(trained, prompts, how.search, how.batch_size))
    else:
        yield from translate(trained, prompts, how.search, how.batch_size)


# --------------------------------------------------------------------------- continuations


def prompt_ids(
    tokenizer: Tokenizer, texts: Sequence[str], stops: frozenset[int] | None
) -> list[list[int]]:
    """Returns the tokens of prompts; see `Generation.stops` for those of conversations.

    Without stops the begin-of-text token comes first, if the tokenizer has one.
    """
    if stops is not None:
        return [ids for ids, _ in tokenizer.encode_marked(texts)]
    begin = tokenizer.begin_ids
    return [[*begin, *ids] for ids in tokenizer.encode_batch(texts)]


def stream(trained: Trained, prompt: str, how: Generation) -> Iterator[str]:
    """Yields the continuation of `prompt` in pieces of text while it is sampled.

    It ends after `how.search.max_tokens` tokens or at the end-of-text token. A character whose
    bytes span several tokens is yielded when it is complete.
    """
    tokenizer, ends = trained.tokenizer, _ends(trained, how)
    (ids,) = prompt_ids(tokenizer, [prompt], how.stops)
    before = ids if how.stops is None else []
    # The end of text takes the place of a prompt without tokens.
    work = [Prompt(ids or [tokenizer.eos_id], how.search.max_tokens, how.sampling.seed)]
    shown, done = "", []
    with trained.in_use():
        for (token,) in continue_texts(
            trained,
            work,
            how.sampling,
            tokenizer.vocab_size,
            lambda text, token: token in ends,
            how.speed,
        ):
            assert token is not None
            if token in ends:
                break
            done.append(token)
            text = text_after(tokenizer, before, done)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
    if rest := text_after(tokenizer, before, done)[len(shown) :]:
        yield rest


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of tokens that follow others; none come before the first tokens of a text.

    Some tokenizers leave out the space with which a text begins, such as those of Llama 2. So some
    of the tokens before are read, too.
    """
    known = before[-_TOKENS_BEFORE:]
    start, whole = tokenizer.decode(known), tokenizer.decode([*known, *ids])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(ids)


def _ends(trained: Trained, how: Generation) -> frozenset[int]:
    return trained.ends | ({trained.tokenizer.eos_id} if how.stops is None else how.stops)


def continue_prompts(trained: Trained, prompts: Sequence[str], how: Generation) -> list[str]:
    """Returns the continuations of prompts, without the end of text; see `answers`."""
    tokens = prompt_ids(trained.tokenizer, prompts, how.stops)
    work = [
        Prompt(ids, how.search.max_tokens, (how.sampling.seed + number) % MOST_SEED)
        for number, ids in enumerate(tokens)
    ]
    continued = continued_ids(trained, work, how)
    before = tokens if how.stops is None else [[] for _ in tokens]
    return [text_after(trained.tokenizer, *both) for both in zip(before, continued)]


def continued_ids(
    trained: Trained, work: Sequence[Prompt], how: Generation, until: Sequence[str] = ()
) -> list[list[int]]:
    """Returns the tokens that continue prompts, without the end of text.

    The end of text takes the place of a prompt without tokens. A continuation also ends when it
    contains one of the texts `until`.
    """
    tokenizer, ends = trained.tokenizer, _ends(trained, how)
    continued: list[list[int]] = [[] for _ in work]
    order = sorted(range(len(work)), key=lambda i: len(work[i].ids))
    with trained.in_use():
        for start in range(0, len(order), how.batch_size):
            batch = order[start : start + how.batch_size]

            def ended(text: int, token: int, batch: Sequence[int] = batch) -> bool:
                if token in ends:
                    return True
                ids = continued[batch[text]]
                ids.append(token)
                shown = tokenizer.decode(ids) if until else ""
                return any(words in shown for words in until)

            some = [replace(work[i], ids=work[i].ids or [tokenizer.eos_id]) for i in batch]
            settings = how.sampling, tokenizer.vocab_size, ended, how.speed
            deque(continue_texts(trained, some, *settings), maxlen=0)
    return continued


# --------------------------------------------------------------------------- blanks


def _parts_of(text: str) -> list[str]:
    """Splits a text at its blanks."""
    parts = text.split(BLANK)
    if len(parts) == 1:
        raise UserError(
            f"the prompt has no blank: write {BLANK} where text is to be filled in, for example "
            f'--prompt "import {BLANK}"'
        )
    return parts


def _filled(prompt: str, words: list[str]) -> str:
    first, *parts = _parts_of(prompt)
    return first + "".join(word + part for word, part in zip(words, parts))


def fill_words(trained: Trained, text: str) -> list[str]:
    """Predicts the most likely token for each blank, for all blanks in one pass.

    All processes call it together and get the same words, one for each blank.

    Raises:
        UserError: The text has no blank, or more tokens than the model reads.
    """
    model, tokenizer, special = trained.model, trained.tokenizer, trained.special
    assert special.cls is not None
    assert special.mask is not None
    assert special.sep is not None
    ids, blanks = [special.cls], []
    for number, part in enumerate(_parts_of(text)):
        if number:
            blanks.append(len(ids))
            ids.append(special.mask)
        ids += tokenizer.encode(part)
    ids.append(special.sep)
    if len(ids) > model.config.max_seq_len:
        raise UserError(
            f"the prompt takes {len(ids)} tokens, and the model reads "
            f"{model.config.max_seq_len}: shorten the prompt"
        )

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        padding = -len(ids) % multiple
        row = torch.tensor([[*ids, *[special.pad] * padding]])
        valid = torch.arange(len(ids) + padding) < len(ids)
        return {"tokens": row.repeat(len(numbers), 1), "valid": valid.repeat(len(numbers), 1)}

    def words(hidden_BSH: Tensor, batch: Batch) -> Tensor | None:
        logits = whole_logits(model, hidden_BSH)
        if logits is None:
            return None
        logits = logits[:, blanks, : special.ordinary_size]
        logits[..., sorted(special.not_words)] = -torch.inf
        return logits.argmax(-1)

    chosen = in_batches(trained, [0], 1, batch_of, words, len(blanks))[0]
    return [tokenizer.decode([int(word)]) for word in chosen.tolist()]


def fill_spans(
    trained: Trained, texts: Sequence[str], search: BeamSearch, batch_size: int = 32
) -> list[list[str]]:
    """Predicts the text of each blank of some prompts with beam search.

    A text is empty if the output of the model does not mention the blank.

    Raises:
        UserError: A prompt has no blank, or more blanks than the model has sentinels.
    """
    special, encode = trained.special, trained.tokenizer.encode
    sources = []
    for text in texts:
        first, *parts = _parts_of(text)
        if len(parts) > len(special.sentinels):
            raise UserError(
                f"the prompt has {len(parts)} blanks, and the model knows "
                f"{len(special.sentinels)}: use no more than these"
            )
        source = encode(first)
        for sentinel, part in zip(special.sentinels, parts):
            source += [sentinel, *encode(part)]
        sources.append([*source, special.eos])
    targets = search_in_batches(trained, sources, search, batch_size, sentinels=True)
    return [
        [*map(trained.tokenizer.decode, spans_of(ids, special.sentinels, text.count(BLANK)))]
        for ids, text in zip(targets, texts)
    ]


def spans_of(ids: Sequence[int], sentinels: Sequence[int], n_blanks: int) -> list[list[int]]:
    """Splits an output of T5 into the tokens of each blank, from its sentinel to the next one."""
    spans: list[list[int]] = [[] for _ in range(n_blanks)]
    here: list[int] = []  # a list that is not returned takes what is before the first sentinel
    for token in ids:
        if token not in sentinels:
            here.append(token)
        else:
            number = sentinels.index(token)
            here = spans[number] if number < n_blanks else []
    return spans


# --------------------------------------------------------------------------- the command


def generate_worker(
    job: Job, prompts: Sequence[str], how: Generation, shown: Sequence[str] | None
) -> None:
    """The entrypoint of every process of `gridformer generate`; rank 0 prints the texts.

    `shown` are the prompts in the output, one JSON object a line; None prints a text alone.
    """
    with job.open() as (trained, rank):

        def write(text: str) -> None:
            if rank == 0:
                sys.stdout.write(text)
                sys.stdout.flush()

        if shown is None:
            for piece in answer(trained, prompts[0], how):
                write(piece)
            write("\n")
        else:
            for name, text in zip(shown, answers(trained, prompts, how)):
                write(json.dumps({"prompt": name, "text": text}, ensure_ascii=False) + "\n")
        if rank == 0 and how.speed.prompt_tokens:
            print(how.speed, file=sys.stderr)
