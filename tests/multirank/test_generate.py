"""A trained model says the same on every layout: the tokens it generates, and its likelihoods."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gridformer.config import LayoutConfig, ModelConfig, RunConfig
from gridformer.data import SpecialIds, Tokenizer
from gridformer.evaluate.beams import BeamSearch, beam_search
from gridformer.evaluate.continuing import Prompt, Sampling, continue_texts
from gridformer.evaluate.generate import fill_words
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import Score, ScoredWindow, score
from gridformer.evaluate.team import Team
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.parallel.data.zero import stored
from tests.support.marks import full_unless
from tests.support.multirank import own_networks
from tests.support.multirank.exactness import CPU, axes_of, tiny
from tests.support.multirank.layouts import n_of, name_of
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.pool import WorkerPool

# The context is used up twice, and no number of devices divides it.
SETTINGS: dict[str, Any] = {"max_seq_len": 11, "init_std": 0.3}
N_TOKENS = 17
# More prompts than rows of any grid, and not a multiple of them.
LENGTHS = (5, 1, 11, 5, 3)

# Windows are as long as the model reads; few words, so that some of them are the most likely.
WINDOW = 12
SCORED: dict[str, Any] = {"max_seq_len": WINDOW, "init_std": 0.3, "vocab_size": 5}

# Heads of keys and values that no axis divides, and a window that is shorter than the context.
LLAMA: dict[str, Any] = {
    "family": "llama", "n_kv_heads": 3, "qk_norm": True, "tied_head": False, "window": 4,
}  # fmt: skip
LLAMA_LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "megatron_2d", "rows": 1, "cols": 4},
    {"scheme": "megatron", "cols": 2, "pp": 2},
    {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight"},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "subgraph", "branches": 4, "common": "first"},
]

QUICK: list[dict[str, Any]] = [
    {"scheme": "optimus", "rows": 2, "cols": 2, "micro_batches": 2},
    {"scheme": "subgraph", "branches": 2, "common": "first", "pp": 2},
]
V_SHAPED: dict[str, Any] = {"stages_per_rank": 2, "pipeline": "zbv"}
QUICK_SCORES: list[dict[str, Any]] = [
    {"scheme": "megatron", "cols": 2, "dp": 2, "sequence_parallel": True},
    {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight"},
    {"scheme": "single", "pp": 2, "micro_batches": 3},
]
LAYOUTS: list[dict[str, Any]] = [
    *QUICK,
    *QUICK_SCORES,
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 1, "cols": 3, "stationary": "weight", "pp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight", "sequence_parallel": True},
    {"scheme": "single", "pp": 2, "stages_per_rank": 2},
    {"scheme": "single", "pp": 2, "micro_batches": 2, **V_SHAPED},
    {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "megatron", "cols": 4, "pp": 2, "sequence_parallel": True},
    {"scheme": "megatron_2d", "rows": 3, "cols": 1, "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "pipelined"},
    {"scheme": "optimus", "rows": 4, "cols": 1, "schedule": "broadcast", "stationary": "input"},
    {"scheme": "optimus", "rows": 1, "cols": 2, "keep_gathered": "all"},
    {"scheme": "subgraph", "branches": 2, "dp": 2},
    {"scheme": "subgraph", "branches": 3, "attention": "outside", "feed_forward": "common"},
    {"scheme": "subgraph", "branches": 4, "common": "first", "attention": "outside"},
]


def built(config: ModelConfig, layout: LayoutConfig, axes: Axes) -> Trained:
    model = build_parallel(config, layout, axes, 3, CPU, "float64")
    run, tokenizer = cast(RunConfig, None), cast(Tokenizer, None)
    return Trained(run, model, tokenizer, layout, axes)


def tokens_of(trained: Trained, sampling: Sampling) -> list[list[int]]:
    """Return the tokens of one rank's continuations."""
    generator = torch.Generator().manual_seed(4)
    v = trained.model.config.vocab_size
    prompts = [
        Prompt(torch.randint(0, v, (n,), generator=generator).tolist(), N_TOKENS - i, i)
        for i, n in enumerate(LENGTHS)
    ]
    found: list[list[int]] = [[] for _ in prompts]
    with trained.in_use():
        for words in continue_texts(trained, prompts, sampling, v - 2):
            for text, word in zip(found, words):
                text += [] if word is None else [word]
    return found


def scores_of(trained: Trained) -> list[Score]:
    """Return the scores of windows of several lengths and numbers of targets."""
    generator, v = torch.Generator().manual_seed(5), trained.model.config.vocab_size
    windows = []
    for i in range(31):
        ids = torch.randint(0, v, (2 + i % WINDOW,), generator=generator).tolist()
        windows.append(ScoredWindow(ids, 1 + i % (len(ids) - 1) * (i % 2)))
    return score(trained, windows, 9)


def likelihoods_of(layout: dict[str, Any], model: dict[str, Any]) -> list[Score]:
    """Return the scores on a layout; the work of one rank."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    return scores_of(built(tiny(**model), plan, axes_of(plan) if plan.n_processes > 1 else Axes()))


def both_of(layout: dict[str, Any], model: dict[str, Any]) -> list[list[list[int]]]:
    """Return the sampled and the most likely tokens on a layout; the work of one rank."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    trained = built(tiny(**model), plan, axes_of(plan) if plan.n_processes > 1 else Axes())
    how = Sampling(temperature=1.0, top_k=60, top_p=0.95)
    return [tokens_of(trained, one) for one in (how, Sampling(temperature=0.0))]


@pytest.mark.parametrize("layout", full_unless(QUICK.__contains__, LAYOUTS), ids=name_of)
def test_every_layout_gives_the_tokens_of_one_device(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    sampled, greedy = both_of({}, SETTINGS)
    assert [len(text) for text in sampled] == [N_TOKENS - i for i in range(len(LENGTHS))]
    assert len({tuple(text) for text in greedy}) == len(LENGTHS), "all texts are alike"
    for rank, found in enumerate(pool.run(n_of(layout), both_of, layout, SETTINGS)):
        assert found == [sampled, greedy], f"rank {rank}"


MORE = [(LLAMA, layout) for layout in LLAMA_LAYOUTS]
MORE += [({"factory": "scaled"}, layout) for layout in LLAMA_LAYOUTS[2:6:2]]
MORE += [({"factory": "scaled"}, LLAMA_LAYOUTS[5])]
# Tokens go to experts on other devices one by one, and devices may have none to send.
EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "experts_over": ["dp"]},
    {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "experts_over": ["cols"]},
    {"scheme": "optimus", "rows": 2, "cols": 2, "experts_over": ["rows", "cols"]},
    {"scheme": "subgraph", "branches": 2, "common": "first", "experts_over": ["branches"]},
]
MORE += [(MODELS["DeepSeek experts"], layout) for layout in EXPERTS]


@pytest.mark.parametrize(
    ("model", "layout"),
    full_unless(lambda case: case in (MORE[0], MORE[-4], MORE[-3]), MORE, unpack=True),
)
def test_other_models_say_the_same_on_every_layout(
    pool: WorkerPool, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    """Networks of others are continued without cached keys."""
    settings, scored = {**SETTINGS, **model}, {**SCORED, **model}
    if "factory" in model:
        settings, scored = (own_networks.of("scaled", max_seq_len=n) for n in (11, 12))
    tokens, likely = both_of({}, settings), likelihoods_of({}, scored)
    assert len({tuple(text) for text in tokens[1]}) == len(LENGTHS), "all texts are alike"
    n = n_of(layout)
    assert pool.run(n, both_of, layout, settings) == [tokens] * n
    for found in pool.run(n, likelihoods_of, layout, scored):
        want = [one.log_likelihood for one in likely]
        assert [one.log_likelihood for one in found] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    "layout", full_unless([*QUICK, *QUICK_SCORES].__contains__, LAYOUTS), ids=name_of
)
def test_every_layout_gives_the_likelihoods_of_one_device(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    want = likelihoods_of({}, SCORED)
    assert {one.greedy for one in want} == {False, True}
    for rank, found in enumerate(pool.run(n_of(layout), likelihoods_of, layout, SCORED)):
        assert [one.greedy for one in found] == [one.greedy for one in want], f"rank {rank}"
        likelihoods = [one.log_likelihood for one in want]
        assert [one.log_likelihood for one in found] == pytest.approx(likelihoods, rel=1e-9)


def as_asked(layout: dict[str, Any]) -> tuple[list[Score], list[list[int]]] | None:
    """Let rank 0 ask for scores and continuations, and the others follow."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    trained = built(tiny(**SETTINGS), plan, axes_of(plan) if plan.n_processes > 1 else Axes())
    team = Team(replace(trained, tokenizer=cast(Tokenizer, Words())), 4)
    if trained.axes.world.index:
        team.follow()
        return None
    scores = team.score([ScoredWindow([5, 3, 8, 9], 2), ScoredWindow([1, 2], 1)])
    said = team.continue_ids([[4, 2], [7]], 9, ["1"], Sampling(temperature=0.0))
    team.release()
    return scores, said


class Words:
    """A tokenizer whose tokens are numbers."""

    vocab_size, eos_id = 80, 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_ranks_follow_what_the_first_one_asks(pool: WorkerPool) -> None:
    want = as_asked({})
    assert want is not None
    assert any("1" in Words().decode(ids) and len(ids) < 9 for ids in want[1]), (
        "until has an effect"
    )
    found, *others = pool.run(2, as_asked, {"scheme": "megatron", "cols": 2})
    assert others == [None]
    assert found is not None
    assert found[1] == want[1]
    likelihoods = [one.log_likelihood for one in want[0]]
    assert [one.log_likelihood for one in found[0]] == pytest.approx(likelihoods, rel=1e-9)


TARGETS = 7
SEEN: dict[str, dict[str, Any]] = {
    "t5": {"family": "t5", "n_decoder_layers": 2, "max_seq_len": 12},
    "transformer": {"family": "transformer", "n_decoder_layers": 2, "max_seq_len": 12},
    "bert": {"family": "bert", "max_seq_len": 12, "init_std": 0.3},
}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("t5", {"scheme": "optimus", "rows": 2, "cols": 2}),
    ("t5", {"scheme": "megatron_2d", "rows": 2, "cols": 2}),
    ("t5", {"scheme": "megatron", "cols": 2, "pp": 2}),
    ("t5", {"scheme": "single", "pp": 3, "stages_per_rank": 2}),
    ("t5", {"scheme": "single", "pp": 3, "micro_batches": 3, **V_SHAPED}),
    ("t5", {"scheme": "subgraph", "branches": 2, "common": "first", "pp": 2}),
    ("transformer", {"scheme": "megatron", "cols": 4, "sequence_parallel": True}),
    ("transformer", {"scheme": "optimus", "rows": 2, "cols": 1, "schedule": "pipelined"}),
    ("transformer", {"scheme": "subgraph", "branches": 3, "attention": "outside"}),
    ("bert", {"scheme": "optimus", "rows": 2, "cols": 2}),
    ("bert", {"scheme": "megatron", "cols": 4, "sequence_parallel": True}),
    ("t5", {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight"}),
    ("bert", {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "weight"}),
]


def said_by(family: str, layout: dict[str, Any]) -> list[Any]:
    """Return the targets of sources, or words for blanks; the work of one rank."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = axes_of(plan) if plan.n_processes > 1 else Axes()
    trained = built(tiny(**SEEN[family]), plan, axes)
    with torch.no_grad():  # so that what was said before matters for what comes next
        for name, parameter in trained.model.named_parameters():
            if parameter.dim() == 2 and "layers" in name:
                stored(parameter).mul_(4.0)
    v, generator = trained.model.config.vocab_size, torch.Generator().manual_seed(6)
    sources = [torch.randint(1, v, (n,), generator=generator).tolist() for n in (3, 9, 1, 6, 5)]
    if family != "bert":
        with trained.in_use():
            greedy = beam_search(trained, sources, 0, 5, BeamSearch(1, 1.0, TARGETS), [7])
            return [greedy, beam_search(trained, sources, 0, 5, BeamSearch(3, 0.5, TARGETS), [7])]
    special = SpecialIds(0, 1, 2, 3, 4, 0, (), v, v - 3, frozenset({0, 1, 2, 3, 4}))
    trained = replace(trained, tokenizer=cast(Tokenizer, Letters()))
    vars(trained)["special"] = special
    return [fill_words(trained, text) for text in ("ab___cd ef___", "___a", "a___bc")]


class Letters:
    """A tokenizer whose tokens are letters, or numbers where it decodes."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 80 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


@pytest.mark.parametrize(
    ("family", "layout"),
    full_unless(lambda case: case in (OTHERS[4], OTHERS[8], OTHERS[-2]), OTHERS, unpack=True),
    ids=str,
)
def test_other_families_say_the_same_on_every_layout(
    pool: WorkerPool, family: str, layout: dict[str, Any]
) -> None:
    want = said_by(family, {})
    assert len({str(one) for one in want}) > 1, "answers must differ"
    n = n_of(layout)
    assert pool.run(n, said_by, family, layout) == [want] * n
