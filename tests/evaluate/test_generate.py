"""Sampling from GPT-2: words are chosen as Hugging Face chooses them, and caches change nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch
from torch import Tensor, nn

from gridformer.config import RunConfig, parse_run
from gridformer.data import TokenFolder, Tokenizer
from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.continuing import (
    Prompt,
    Sampling,
    Speed,
    continue_texts,
    sample_tokens,
    uniform,
)
from gridformer.evaluate.generate import Generation, continue_prompts, stream, text_after
from gridformer.evaluate.loading import Trained, load_model
from gridformer.models import GPT2, Activations, Model
from gridformer.utils.batch import Batch
from gridformer.utils.errors import UserError
from tests.support.checkpoints import built, save_model
from tests.support.reference.shared import pair, tokens_of, transformers

GREEDY = Sampling(temperature=0.0)
TEN = Generation(GREEDY, BeamSearch(max_tokens=10))
NO_RUN = cast(RunConfig, None)  # of a model that no run has trained


def trained(model: Model, tokenizer: Tokenizer | None = None) -> Trained:
    return Trained(NO_RUN, model, cast(Tokenizer, tokenizer))


def continued(
    model: Model, prompts: list[list[int]], n: int, how: Sampling, vocab_size: int, *ending: Any
) -> list[list[int]]:
    """Return the tokens that continue each of several prompts in one batch."""
    work = [Prompt(ids, n, how.seed + i) for i, ids in enumerate(prompts)]
    found: list[list[int]] = [[] for _ in prompts]
    for words in continue_texts(trained(model), work, how, vocab_size, *ending):
        for text, word in zip(found, words):
            text += [] if word is None else [word]
    return found


def sample(model: Model, ids: list[int], n: int, how: Sampling, vocab_size: int) -> list[int]:
    (found,) = continued(model, [ids], n, how, vocab_size)
    return found


# --------------------------------------------------------------------------- the context


@pytest.mark.parametrize(("window", "n_prompt"), [(8, 3), (7, 7), (5, 12), (2, 1), (1, 1)])
def test_a_text_longer_than_the_context_is_that_without_caches(window: int, n_prompt: int) -> None:
    """Compare with Hugging Face's model, which reads the remaining context anew for each token.

    The whole context remains until it is full, and then its second half. (If caches or positions
    were kept, the logits would differ.)
    """
    ours, theirs = pair("gpt2", torch.float64, n_layers=2, max_seq_len=window)
    prompt = tokens_of(211, 1, n_prompt)[0].tolist()
    found = sample(ours, prompt, 4 * window + 3, GREEDY, 211)
    context, want = prompt[-window:], []
    for _ in found:
        if len(context) > window:
            context = context[-max(1, window // 2) :]
        with torch.no_grad():
            logits = theirs(torch.tensor([context])).logits[0, -1]
        want.append(int(logits.argmax()))
        context.append(want[-1])
    assert len(found) == 4 * window + 3
    assert found == want


@pytest.mark.parametrize("window", [32, 9])
def test_a_batch_is_continued_as_each_prompt_alone(window: int) -> None:
    """Prompts of several lengths, one of them as long as the context, sampled with their seeds."""
    ours, _ = pair("gpt2", torch.float64, n_layers=2, max_seq_len=window)
    tokens = tokens_of(211, 4, 9)
    prompts = [row[:n].tolist() for row, n in zip(tokens, (5, 9, 1, 3))]
    how = Sampling(temperature=1.5, top_k=150, top_p=0.99, seed=5)
    found = continued(ours, prompts, 20, how, 211)
    for number, ids in enumerate(prompts):
        alone = Sampling(temperature=1.5, top_k=150, top_p=0.99, seed=5 + number)
        assert found[number] == sample(ours, ids, 20, alone, 211)
    assert len({tuple(text) for text in found}) == 4


def test_a_text_that_ends_stops_and_the_others_go_on() -> None:
    ours, _ = pair("gpt2", torch.float64, n_layers=1, max_seq_len=16)
    prompts = [row.tolist() for row in tokens_of(211, 3, 4)]
    whole = continued(ours, prompts, 12, GREEDY, 211)
    end = whole[1][3]
    speed = Speed()
    found = continued(ours, prompts, 12, GREEDY, 211, lambda text, token: token == end, speed)
    assert found == [text[: text.index(end) + 1] if end in text else text for text in whole]
    assert (speed.prompt_tokens, speed.new_tokens) == (12, sum(map(len, found)))


# --------------------------------------------------------------------------- one word

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.5, 0.0, 1.0, -0.5, -3.0])
N_DRAWS = 4000


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.5, top_k=3),
        Sampling(temperature=1.0, top_k=8),
        Sampling(temperature=1.0, top_p=0.01),
        Sampling(temperature=1.0, top_p=0.75),
        Sampling(temperature=2.0, top_k=5, top_p=0.6),
    ],
    ids=str,
)
def test_words_are_chosen_as_often_as_hugging_face_would(sampling: Sampling) -> None:
    """Hugging Face's three warpers give each word's probability; compare to 5 deviations."""
    chain = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        chain.append(transformers.TopKLogitsWarper(sampling.top_k))
    chain.append(transformers.TopPLogitsWarper(sampling.top_p))
    scores = LOGITS[None]
    for warper in chain:
        scores = warper(None, scores)
    want = scores[0].softmax(-1)
    places = torch.arange(N_DRAWS)
    numbers = uniform(torch.ones_like(places), places)
    drawn = sample_tokens(LOGITS.expand(N_DRAWS, -1), sampling, numbers)
    found = torch.bincount(drawn, minlength=len(LOGITS)) / N_DRAWS
    assert not bool(found[want == 0].any()), "a word that was filtered out"
    deviation = (want * (1 - want) / N_DRAWS).sqrt()
    assert bool(((found - want).abs() <= 5 * deviation).all()), (found, want)


# --------------------------------------------------------------------------- streaming


class Scripted(nn.Module):
    """A GPT-2 that, after n tokens, ranks tokens by `orders[n]`, and records its inputs."""

    keeps_keys = True

    def __init__(self, orders: Sequence[Sequence[int]], v: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_seq_len=64, n_layers=1, vocab_size=v, two_stacks=False)
        self.loss = None
        self.weight = nn.Parameter(torch.zeros(1))
        self.orders, self.v = orders, v
        self.asked: list[list[int]] = []

    def run(self, batch: Batch, entering: Any, links: Any, caches: Any, start: int) -> Activations:
        """Return logits in place of hidden states."""
        tokens_BS = batch["tokens"]
        self.asked.append(tokens_BS[0].tolist())
        logits = torch.full((1, tokens_BS.shape[1], self.v), -10.0)
        for place, token in enumerate(self.orders[len(self.asked) - 1]):
            logits[0, -1, token] = 10.0 - place
        return Activations(logits)

    def token_logits(self, hidden_BSH: Tensor) -> Tensor:
        return hidden_BSH


def scripted(*orders: Sequence[int], v: int = 400) -> GPT2:
    return cast(GPT2, Scripted(orders, v))


def test_words_beyond_the_vocabulary_are_never_chosen() -> None:
    """Those ids pad the vocabulary, or are special ids that the tokenizer cannot spell."""
    assert sample(scripted((390, 5), (399, 300, 7)), [1], 2, GREEDY, 300) == [5, 7]


def test_only_new_tokens_are_read_where_there_are_caches() -> None:
    model = scripted((5,), (6,), (7,))
    assert sample(model, [1, 2, 3], 3, GREEDY, 300) == [5, 6, 7]
    assert cast(Any, model).asked == [[1, 2, 3], [5], [6]]


def test_a_stream_ends_with_the_text(token_folder: Path) -> None:
    """The end-of-text token is not shown, and nothing after it is computed."""
    tokenizer = TokenFolder.open(token_folder).tokenizer
    a, b = tokenizer.encode("line")[0], tokenizer.encode("7")[0]
    model = scripted((a,), (b,), (tokenizer.eos_id,), (a,))
    said = list(stream(trained(model, tokenizer), "x", TEN))
    assert "".join(said) == tokenizer.decode([a, b])
    assert len(cast(Any, model).asked) == 3


def test_a_character_comes_out_when_it_is_complete(token_folder: Path) -> None:
    """A character not in the vocabulary consists of byte tokens, and is shown only complete."""
    tokenizer = TokenFolder.open(token_folder).tokenizer
    euro, x = tokenizer.encode("€"), tokenizer.encode("x")[0]
    assert len(euro) > 1

    def pieces(ids: list[int]) -> Iterator[str]:
        how = Generation(GREEDY, BeamSearch(max_tokens=len(ids)))
        return stream(trained(scripted(*[(i,) for i in ids]), tokenizer), "x", how)

    assert list(pieces([x, *euro, x])) == ["x", "€", "x"]
    assert list(pieces([x, euro[0]])) == ["x", "�"]


def test_the_space_after_the_prompt_is_kept() -> None:
    """The tokenizers of Llama 2 leave out the space with which a text begins."""
    words = {word: i for i, word in enumerate(["\u2581the", "\u2581fox", "\u2581runs", "</s>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [("Replace", ("\u2581", " ")), ("Fuse", ()), ("Strip", (" ", 1, 0))]
    backend.decoder = tokenizers.decoders.Sequence(
        [getattr(tokenizers.decoders, name)(*how) for name, how in parts]
    )
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, "a test")
    assert tokenizer.decode([1, 2]) == "fox runs", "it leaves it out"
    model = scripted((1,), (2,), (tokenizer.eos_id,))
    assert [*stream(trained(model, tokenizer), "the", TEN)] == [" fox", " runs"]
    model = scripted((1,), (2,), (tokenizer.eos_id,))
    (found,) = continue_prompts(trained(model, tokenizer), ["the"], TEN)
    assert found == " fox runs"
    assert text_after(tokenizer, [], [1, 2]) == "fox runs"


def test_logits_that_are_not_finite_are_refused() -> None:
    """No word is the likeliest then. On a GPU an index would be out of bounds."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0]])
    numbers = torch.zeros(3, dtype=torch.float64)
    for how in (GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)):
        assert sample_tokens(logits, how, numbers).tolist() == [1, -1, -1]
    model = scripted((1,), (2,))
    cast(Any, model).token_logits = lambda hidden_BSH: hidden_BSH * float("nan")
    with pytest.raises(UserError, match="NaN or infinite values: use another --dtype"):
        sample(model, [1], 2, GREEDY, 300)


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e3])
def test_any_temperature_chooses_words(temperature: float) -> None:
    numbers = torch.linspace(0, 0.999, 16, dtype=torch.float64)
    found = sample_tokens(LOGITS.expand(16, -1), Sampling(temperature=temperature), numbers)
    assert ((found >= 0) & (found < LOGITS.shape[-1])).all()
    assert temperature > 1 or (found == LOGITS.argmax()).all()


# --------------------------------------------------------------------------- loading


def test_a_loaded_model_has_no_dropout(token_folder: Path, tmp_path: Path) -> None:
    """A model trained with dropout has the logits of one without it."""
    model = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 8, "vocab_size": 301}
    rates = {"dropout": 0.5, "attention_dropout": 0.5}
    sections = {"data": {"path": str(token_folder)}, "train": {"dtype": "float64", "seed": 3}}
    run = parse_run({"model": {**model, **rates}, **sections})
    plain = parse_run({"model": model, **sections})
    save_model(tmp_path, run, 0, seed=3)
    (tmp_path / "tokenizer.json").write_bytes((token_folder / "tokenizer.json").read_bytes())
    loaded = load_model(tmp_path, torch.device("cpu")).model
    tokens = tokens_of(301, 2, 8)
    with torch.no_grad():
        want = built(plain, 3)(tokens)
        assert torch.equal(loaded(tokens), want)
        assert not torch.equal(built(run, 3).train()(tokens), want), "dropout must matter here"
