"""Generates text with a checkpoint of any layout: continues, translates or fills in blanks."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from gridformer.config import ModelConfig
from gridformer.data import Tokenizer
from gridformer.evaluate.beams import BeamSearch, fill_spans, fill_words, parts_of, translate
from gridformer.evaluate.continuing import MOST_SEED, Prompt, Sampling, Speed, continue_texts
from gridformer.evaluate.loading import Job, Trained
from gridformer.models import BERT, EncoderDecoder
from gridformer.utils.errors import ConfigError

# Of prompts that a chat template has rendered: the ids of tokens that end an answer. Special tokens
# are spelled out in such prompts. None means plain prompts.
Stops = frozenset[int] | None
_TOKENS_BEFORE = 8  # as many as may belong to one character or word, and some more


def check_options(model: ModelConfig, given: Sequence[str], chat: bool = False) -> None:
    """Checks that a model uses all options that were given.

    Args:
        model: Config of the model.
        given: Names of fields of `Sampling` and `BeamSearch`.
        chat: Whether prompts are conversations.

    Raises:
        ConfigError: The family of the model does not use one of the options.
    """
    if not model.token_head:
        raise ConfigError(
            "this model was fine-tuned and predicts no tokens: use gridformer evaluate"
        )
    family = model.family
    samples, searches = continues(model), model.two_stacks
    of_sampling = {field.name for field in fields(Sampling)}
    problems = []
    if chat and not samples:
        problems.append(f"--chat is for gpt2 and llama, and this model is a {family}: leave it out")
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if name in of_sampling and not samples:
            instead = "use --beams and --length-penalty, or leave it out"
            problems.append(
                f"{option} is for gpt2 and llama, which sample tokens; this model is a {family}: "
                f"{instead if searches else 'leave it out'}"
            )
        elif name not in of_sampling and not searches:
            instead = "use --temperature, --top-k and --top-p, or leave it out"
            problems.append(
                f"{option} is for t5 and transformer, which use beam search; this model is a "
                f"{family}: {instead if samples else 'leave it out'}"
            )
    if problems:
        raise ConfigError(*problems)


def continues(model: ModelConfig) -> bool:
    """Returns whether a model continues texts."""
    return not model.two_stacks and model.family != "bert" and model.token_head


def answer(
    trained: Trained,
    prompt: str,
    sampling: Sampling,
    how: BeamSearch,
    speed: Speed | None = None,
    stops: Stops = None,
) -> Iterator[str]:
    """Yields the output of a model for a prompt in pieces of text.

    For gpt2 and llama it is the prompt and its continuation. For bert, and for t5 trained on spans,
    it is the prompt with its blanks filled in. For t5 and transformer trained on pairs, it is the
    second text of the pair.

    Args:
        trained: The model.
        prompt: Text; ___ marks a blank.
        sampling: Settings for gpt2 and llama.
        how: Settings for t5 and transformer. `max_tokens` applies to all of them.
        speed: Counts tokens and seconds of gpt2 and llama.
        stops: See `Stops`. With stops, the prompt of gpt2 and llama is not yielded.

    Raises:
        UserError: Blanks are missing, or the prompt is too long; see `fill_words` and `fill_spans`.
    """
    model = trained.model
    if isinstance(model, BERT):
        yield _filled(prompt, fill_words(trained, trained.special, prompt))
    elif isinstance(model, EncoderDecoder) and trained.run.task == "spans":
        yield _filled(prompt, fill_spans(trained, trained.special, [prompt], how)[0])
    elif isinstance(model, EncoderDecoder):
        yield from translate(trained, trained.special, [prompt], how)
    else:
        if stops is None:
            yield prompt
        yield from stream(trained, prompt, how.max_tokens, sampling, speed, stops)


def answer_prompts(
    trained: Trained, prompts: Sequence[str], how: BeamSearch, batch_size: int
) -> list[str]:
    """Returns what an encoder-decoder generates for each prompt, the same as `answer`.

    All processes call it together.

    Args:
        trained: A t5 or transformer.
        prompts: The prompts.
        how: Settings.
        batch_size: The number of prompts of about equal length that go through the model together.
    """
    if trained.run.task != "spans":
        return translate(trained, trained.special, prompts, how, batch_size)
    spans = fill_spans(trained, trained.special, prompts, how, batch_size)
    return [_filled(prompt, words) for prompt, words in zip(prompts, spans)]


def _filled(prompt: str, words: list[str]) -> str:
    parts = parts_of(prompt)
    return parts[0] + "".join(word + part for word, part in zip(words, parts[1:]))


# --------------------------------------------------------------------------- continuations


def prompt_ids(tokenizer: Tokenizer, texts: Sequence[str], stops: Stops) -> list[list[int]]:
    """Returns the tokens of prompts; see `Stops` for those of conversations.

    Args:
        tokenizer: The tokenizer.
        texts: The prompts.
        stops: Whether special tokens are spelled out in the prompts; see `Stops`. Without stops the
            begin-of-text token comes first, if the tokenizer has one.
    """
    if stops is not None:
        return [ids for ids, _ in tokenizer.encode_marked(texts)]
    begin = tokenizer.begin_ids
    return [[*begin, *ids] for ids in tokenizer.encode_batch(texts)]


def stream(
    trained: Trained,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    speed: Speed | None = None,
    stops: Stops = None,
) -> Iterator[str]:
    """Yields the continuation of `prompt` in pieces of text while it is sampled.

    It ends after max_tokens tokens or at the end-of-text token. A character whose bytes span
    several tokens is yielded when it is complete.

    Args:
        trained: A model that continues texts.
        prompt: The prompt.
        max_tokens: The most tokens to sample.
        sampling: Settings.
        speed: Counts tokens and seconds.
        stops: See `Stops`.
    """
    tokenizer = trained.tokenizer
    shown, done = "", []
    (ids,) = prompt_ids(tokenizer, [prompt], stops)
    before = ids if stops is None else []
    for token in sampled_ids(trained, ids, max_tokens, sampling, speed, stops):
        if token in _ends(trained, stops):
            break
        done.append(token)
        text = text_after(tokenizer, before, done)
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    rest = text_after(tokenizer, before, done)[len(shown) :]
    if rest:
        yield rest


def sampled_ids(
    trained: Trained,
    ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    speed: Speed | None = None,
    stops: Stops = None,
) -> Iterator[int]:
    """Yields up to max_tokens token ids that continue `ids`; the last may be the end of text.

    All processes call it together and get the same tokens; see `continue_texts`.

    Args:
        trained: A model that continues texts.
        ids: The tokens of the prompt; the end of text takes the place of none.
        max_tokens: The most tokens to sample.
        sampling: Settings.
        speed: Counts tokens and seconds.
        stops: See `Stops`.
    """
    tokenizer = trained.tokenizer
    prompt = Prompt(ids or [tokenizer.eos_id], max_tokens, sampling.seed)
    ends = _ends(trained, stops)

    def ended(text: int, token: int) -> bool:
        return token in ends

    with trained.in_use():
        for found in continue_texts(
            trained, [prompt], sampling, tokenizer.vocab_size, ended, speed
        ):
            assert found[0] is not None
            yield found[0]


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of tokens that follow others.

    Some tokenizers leave out the space with which a text begins, such as those of Llama 2. So some
    of the tokens before are read, too.

    Args:
        tokenizer: The tokenizer.
        before: The tokens before; none for the first tokens of a text.
        ids: The tokens.
    """
    known = before[-_TOKENS_BEFORE:]
    start, whole = tokenizer.decode(known), tokenizer.decode([*known, *ids])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(ids)


def _ends(trained: Trained, stops: Stops) -> frozenset[int]:
    return trained.ends | ({trained.tokenizer.eos_id} if stops is None else stops)


def continue_prompts(
    trained: Trained,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    batch_size: int,
    speed: Speed | None = None,
    stops: Stops = None,
) -> list[str]:
    """Returns the continuations of prompts, without the end of text.

    All processes call it together. `batch_size` prompts of about equal length go through the model
    at a time. Prompt i, counted from 0, is continued as it is alone with the
    seed `sampling.seed` + i.

    Args:
        trained: A model that continues texts.
        prompts: The prompts.
        max_tokens: The largest number of tokens for each.
        sampling: Settings.
        batch_size: Prompts at a time.
        speed: Counts tokens and seconds.
        stops: See `Stops`.
    """
    work = [
        Prompt(ids, max_tokens, (sampling.seed + number) % MOST_SEED)
        for number, ids in enumerate(prompt_ids(trained.tokenizer, prompts, stops))
    ]
    said = continued_ids(trained, work, sampling, batch_size, speed, stops=stops)
    before = [one.ids if stops is None else [] for one in work]
    return [text_after(trained.tokenizer, known, ids) for known, ids in zip(before, said)]


def continued_ids(
    trained: Trained,
    work: Sequence[Prompt],
    sampling: Sampling,
    batch_size: int,
    speed: Speed | None = None,
    until: Sequence[str] = (),
    stops: Stops = None,
) -> list[list[int]]:
    """Returns the tokens that continue prompts, without the end of text.

    Args:
        trained, sampling, batch_size, speed: See `continue_prompts`.
        work: The prompts; the end of text takes the place of one without tokens.
        until: A continuation also ends when it contains one of these texts.
        stops: See `Stops`.
    """
    tokenizer = trained.tokenizer
    ends = _ends(trained, stops)
    said: list[list[int]] = [[] for _ in work]
    order = sorted(range(len(work)), key=lambda i: len(work[i].ids))
    with trained.in_use():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]

            def ended(text: int, token: int, batch: Sequence[int] = batch) -> bool:
                if token in ends:
                    return True
                ids = said[batch[text]]
                ids.append(token)
                shown = tokenizer.decode(ids) if until else ""
                return any(words in shown for words in until)

            some = [replace(work[i], ids=work[i].ids or [tokenizer.eos_id]) for i in batch]
            passes = continue_texts(trained, some, sampling, tokenizer.vocab_size, ended, speed)
            deque(passes, maxlen=0)
    return said


@dataclass(frozen=True)
class Generation:
    """Prompts and settings.

    Attributes:
        prompts: The prompts.
        many: Whether they come from a file, so that the output is one JSON object a line.
        batch_size: Prompts that go through the model together.
        sampling: Settings for models that continue texts.
        how: Settings for encoder-decoders.
        shown: What the output calls each prompt, if that is not the prompt itself.
        stops: Of conversations, see `gridformer.evaluate.generate.Stops`.
    """

    prompts: list[str]
    many: bool = False
    batch_size: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    how: BeamSearch = field(default_factory=BeamSearch)
    shown: list[str] | None = None
    stops: Stops = None


def generate_worker(job: Job, asked: Generation) -> None:
    """The entrypoint of every process of `gridformer generate`; rank 0 prints the texts."""
    with job.open() as (trained, rank):
        speed, how, prompts = Speed(), asked.how, asked.prompts

        def write(text: str) -> None:
            if rank == 0:
                sys.stdout.write(text)
                sys.stdout.flush()

        def pieces(prompt: str) -> Iterator[str]:
            return answer(trained, prompt, asked.sampling, how, speed, asked.stops)

        texts: Iterable[str]
        if not asked.many:
            for prompt in prompts:
                for text in pieces(prompt):
                    write(text)
                write("\n")
        else:
            if continues(job.run.model):
                settings = how.max_tokens, asked.sampling, asked.batch_size, speed, asked.stops
                texts = continue_prompts(trained, prompts, *settings)
            elif job.run.model.two_stacks:
                texts = answer_prompts(trained, prompts, how, asked.batch_size)
            else:  # of bert one after the other
                texts = ("".join(pieces(prompt)) for prompt in prompts)
            for prompt, text in zip(asked.shown or prompts, texts):
                write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        if rank == 0 and speed.prompt_tokens:
            print(speed, file=sys.stderr)
