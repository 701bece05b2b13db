"""Networks that nobody planned for train on layouts as in one process, and say why if they cannot.

Losses, every gradient and the weights after three steps of AdamW are compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gridformer
from examples import own_model
from gridformer.config import LayoutConfig
from gridformer.mesh import Axis
from gridformer.models.network_calls import attends_plainly
from gridformer.parallel.network.modules import Beside
from gridformer.parallel.network.plan import PlanRole, default_plan, is_table, roles_of
from gridformer.parallel.network.refusals import check
from gridformer.parallel.tensor.summa import Sharded
from gridformer.prove import check_with_inputs, compare
from gridformer.utils.errors import ConfigError
from tests.support.marks import full_unless
from tests.support.multirank.expert_networks import Made, causal, deepseek, mixtral
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool


class Attention(nn.Module):
    """Attention with separate products, softmax by itself and a norm of each head."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d = heads, h // heads
        self.out = nn.Linear(h, h)  # as in Phi-3, before what runs before it
        self.q, self.k, self.v = (nn.Linear(h, h) for _ in range(3))
        self.norm = nn.LayerNorm(self.d)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, heads))  # one number for each head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.heads, self.d)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        scores = self.norm(q) @ k.transpose(2, 3) * self.scale[:, None, None]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h, bias=False)
        self.attention = Attention(h, heads)
        self.mlp = nn.Sequential(nn.Linear(h, 3 * h), nn.GELU(), nn.Linear(3 * h, h))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images [b, 3, 12, 12] to logits [b, 10]: 16 patches, a token of the class, a blank."""

    def __init__(self, h: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, h, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, h))
        self.places = nn.Parameter(torch.randn(1, 17, h))
        self.blocks = nn.Sequential(*(Block(h, heads) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        x = F.pad(x, (0, 0, 0, 1))  # 18 tokens divide over two devices
        return self.head(self.norm(self.blocks(x))[:, 0])


VIT_PLAN = {
    **dict.fromkeys(("patches", "token", "places", "head"), "replicated"),
    "blocks.*.attention": "heads: heads",
    "blocks.*.attention.[qkv]": "opening",
    "blocks.*.attention.norm": "summed",
    "blocks.*.attention.scale": "local",
    "blocks.*.attention.out": "closing",
    "blocks.*.mlp.0": "opening",
    "blocks.*.mlp.2": "closing",
}
GPT2_PLAN = {
    "transformer.wte": "embedding",
    "transformer.wpe": "replicated",
    "transformer.h.*.attn": "heads: num_heads, split_size",
    "*.c_attn": "opening: 3 parts",
    "*.c_fc": "opening",
    "*.c_proj": "closing",
    "lm_head": "head",
}


def vit() -> Made:
    images = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    return ViT(), (images,), VIT_PLAN


def decoder() -> Made:
    return own_model.network()


def llama() -> Made:
    """Its own plan; two heads of keys; 97 words, which nothing divides."""
    config = pytest.importorskip("transformers").LlamaConfig
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return (*causal("LlamaForCausalLM", config, 97, **sizes, **heads), None)


def padded() -> Made:
    """Llama with a mask and positions of each sample."""
    module, inputs, plan = llama()
    mask = torch.arange(12) > torch.arange(8).unsqueeze(1)
    positions = mask.cumsum(1).clamp(min=1) - 1
    return module, {**inputs, "attention_mask": mask.long(), "position_ids": positions}, plan


def gpt2() -> Made:
    """Conv1D, a fused product of q, k and v, and a head that shares the table of tokens."""
    config = pytest.importorskip("transformers").GPT2Config
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return (*causal("GPT2LMHeadModel", config, 97, **sizes, **rates), GPT2_PLAN)


def aria() -> Made:
    """Matrices of experts that are [in, out]."""
    config = pytest.importorskip("transformers").AriaTextConfig
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    experts = {"moe_num_experts": 4, "moe_topk": 2, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, **heads, **experts}
    return (*causal("AriaTextForCausalLM", config, 97, **sizes), None)


class Crossing(nn.Module):
    """Attention of one activation to another."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d = heads, h // heads
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, self.d)).transpose(1, 2)
            for y in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossedLayer(nn.Module):
    """Attends to its own activation, given twice, and to one that comes from outside the layers."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.own, self.cross = Crossing(h, heads), Crossing(h, heads)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.own(y, y)
        return x + self.cross(self.norm2(x), context)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(97, 32, padding_idx=0), nn.Linear(6, 32)
        self.layers = nn.ModuleList(CrossedLayer(32, 4) for _ in range(2))

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        x, encoded = self.words(tokens), self.encoder(context)
        for layer in self.layers:
            x = layer(x, encoded)
        return x


def crossed() -> Made:
    """The context is as long as the part of the tokens that one of two columns has."""
    plan = {"words": "embedding", "encoder": "replicated", "layers.*.out": "closing"}
    plan |= {f"layers.*.{name}": "opening" for name in "qkv"}
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (8, 12), generator=draw)
    tokens[:, 10:] = 0  # padding, whose row of the table gets no gradient
    heads = {"layers.*.own": "heads: heads", "layers.*.cross": "heads: heads"}
    return Crossed(), (tokens, torch.randn(8, 6, 6, generator=draw)), plan | heads


LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"scheme": "megatron", "cols": 2},
    "tokens": {"scheme": "megatron", "cols": 2, "sequence_parallel": True},
    "megatron_2d": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "branches": {"scheme": "subgraph", "branches": 2},
    "fsdp": {"dp": 2, "dp_mode": "fsdp"},
    "zero1": {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "zero1"},
    "both": {"scheme": "optimus", "cols": 2, "dp": 2, "dp_mode": "fsdp"},
}
OF_TOKENS: dict[str, dict[str, Any]] = {
    "stages": {"scheme": "optimus", "rows": 2, "pp": 2, "micro_batches": 2},
    "stages_fsdp": {"pp": 2, "stages_per_rank": 2, "micro_batches": 2, "dp": 2, "dp_mode": "fsdp"},
    "rows": {"scheme": "optimus", "rows": 2, "cols": 2, "rows_over": "sequence"},
    "rows_stages": {"scheme": "megatron_2d", "rows": 2, "pp": 2, "rows_over": "sequence"},
}
NETWORKS = {
    made.__name__: made
    for made in (decoder, vit, crossed, llama, padded, gpt2, mixtral, aria, deepseek)
}


def measured(name: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module, inputs, plan = NETWORKS[name]()
    return compare(module, inputs, LayoutConfig(**layout), plan)


# Of each network in make test; the decoder is on all layouts there.
QUICK = {
    "vit": "optimus branches",
    "crossed": "megatron_2d branches",
    "llama": "both",
    "padded": "branches",
    "aria": "optimus",
    "gpt2": "optimus zero1",
    "mixtral": "branches both",
    "deepseek": "tokens optimus",
}
MANY = "decoder", "llama", "mixtral"  # which run on some tokens of each sequence
PAIRS = [(name, layout) for name in NETWORKS for layout in LAYOUTS]
PAIRS += [(name, layout) for name in (*MANY, "aria") for layout in OF_TOKENS]


@pytest.mark.parametrize(
    ("name", "layout"),
    full_unless(lambda pair: pair[1] in QUICK.get(pair[0], pair[1]).split(), PAIRS, unpack=True),
)
def test_equals_one_process(pool: WorkerPool, name: str, layout: str) -> None:
    if name not in ("decoder", "vit", "crossed"):
        pytest.importorskip("transformers")
    values = {**LAYOUTS, **OF_TOKENS}[layout]
    proof = pool.run(LayoutConfig(**values).n_processes, measured, name, values)[0]
    assert proof.equal, proof.worst
    assert proof.worst["relative"] < 1e-10


@pytest.mark.parametrize("layout", ["stages_fsdp", "rows_stages"])
def test_equals_one_process_over_nccl(pool: WorkerPool, layout: str) -> None:
    n = LayoutConfig(**OF_TOKENS[layout]).n_processes
    proof = pool.run(n, on_nccl, measured, "decoder", OF_TOKENS[layout])[0]
    assert proof.equal, proof.worst


def test_another_activation_that_layers_make_of_all_tokens_ends_the_step() -> None:
    """Its gradients would be parts of the right ones, without a word."""
    beside = Beside(Sharded(Axis("col", 2), 1))
    part = torch.ones(2, 6, 8)
    assert beside(part, part, torch.neg) is part
    with pytest.raises(ValueError, match=r"\[2, 12, 8\] of all tokens, which layers make, is"):
        beside({"more": torch.ones(2, 12, 8, requires_grad=True)}, part, torch.neg)


@pytest.mark.parametrize(
    ("layout", "shape", "said"),
    [
        ("tokens", (4, 7), "divides tokens between sections, and 7 do not divide by 2"),
        ("branches", (3, 8), "divides samples between sections, and 3 do not divide by 2"),
        ("zero1", (3, 8), "divides samples"),
    ],
)
def test_inputs_that_do_not_divide_are_refused_before_a_process_starts(
    layout: str, shape: tuple[int, int], said: str
) -> None:
    (module, _, plan), inputs = decoder(), (torch.zeros(shape).long(),)
    with pytest.raises(ConfigError, match=said):
        check_with_inputs(module, inputs, LayoutConfig(**LAYOUTS[layout]), plan)


def differs(which: str) -> Any:
    """Compares after a mistake that a wrong plan would make."""
    torch.manual_seed(0)
    module, inputs, plan = vit()
    wrong = {**(plan or {}), "blocks.*.attention.norm": which}
    return compare(module, inputs, LayoutConfig(scheme="megatron", cols=2), wrong)


def test_a_wrong_plan_is_seen(pool: WorkerPool) -> None:
    """Gradients of a norm of each head are partial sums: as replicated, each device has its own."""
    assert pool.run(2, differs, "summed")[0].equal
    proof = pool.run(2, differs, "replicated")[0]
    assert not proof.equal
    assert "attention.norm" in proof.worst["name"]
    assert proof.worst["relative"] > 1e-3


# --------------------------------------------------------------------------- its use


def one_step(layout: dict[str, Any] | None) -> tuple[float, dict[str, Tensor], int]:
    """Accumulates two batches, clips, and updates; on a layout or, without one, as torch does."""
    torch.manual_seed(0)
    module, _, plan = decoder()
    module = module.double()
    module.get_submodule("layers.0.norm1").requires_grad_(False)
    batches = [own_model.batch_of(1), own_model.batch_of(2)]
    if layout is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for batch in batches:
            (own_model.loss_of(module(batch["tokens"]), batch) / 2).backward()
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
        return norm, module.state_dict(), sum(p.numel() for p in module.parameters())
    net = gridformer.parallelize(module, layout, plan)
    updates = net.optimizer(torch.optim.SGD, lr=1.0)
    if "pp" in layout:
        both = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        net.train_batch(both, own_model.loss_of)
    for i, batch in enumerate(batches if "pp" not in layout else ()):
        part = net.local(batch)
        net.backward(own_model.loss_of(net(part["tokens"]), part) / 2, last=i == 1)
    norm = net.clip_gradients(0.1)
    updates.step()
    held = sum(p.untyped_storage().nbytes() // 8 for p in {*net.module.parameters()})
    held += sum(p.numel() for _, p in net.named_parameters()) if "dp_mode" in layout else 0
    return norm, net.state_dict(), held


@pytest.mark.parametrize("name", ["tokens", "optimus", "fsdp", "both", *OF_TOKENS])
def test_a_step_with_clipping_and_two_batches(pool: WorkerPool, name: str) -> None:
    """Every process has the whole state, and memory for its share of the parameters."""
    norm, state, elements = one_step(None)
    layout = {**LAYOUTS, **OF_TOKENS}[name]
    n, of_ends = LayoutConfig(**layout).n_processes, 512 * 64 // 2 if "pp" in layout else 0
    for ours, whole, held in pool.run(n, one_step, layout):
        assert ours == pytest.approx(norm, rel=1e-12)
        assert whole.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-11, atol=1e-13)
        # Vectors and the table of positions are on several devices, of which one updates them.
        assert 0.9 * elements / n <= held < 1.1 * elements / n + 2 * 32 * 64 + of_ends
    own_model.Decoder(2, 64, 4).double().load_state_dict(whole)


def test_windows_that_only_a_mask_has_are_left_to_it() -> None:
    """Mistral says its window where it attends, Qwen2-MoE does not."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    for name, plainly in (("Mistral", True), ("Qwen2Moe", False)):
        config = getattr(transformers, f"{name}Config")(**sizes)
        assert attends_plainly(getattr(transformers, f"{name}ForCausalLM")(config)) == plainly


def other_weights() -> str:
    torch.manual_seed(dist.get_rank())
    module, _, plan = decoder()
    with pytest.raises(RuntimeError) as refused:
        gridformer.parallelize(module, {"scheme": "megatron", "cols": 2}, plan)
    return str(refused.value)


def test_weights_must_be_equal(pool: WorkerPool) -> None:
    assert all(
        "the processes' weights differ: words.weight" in t for t in pool.run(2, other_weights)
    )


def test_processes_must_be_there() -> None:
    module, _, plan = decoder()
    with pytest.raises(RuntimeError, match="needs 2 processes and the default process group has 1"):
        gridformer.parallelize(module, {"scheme": "megatron", "cols": 2}, plan)


# --------------------------------------------------------------------------- refusals


def without(pattern: str) -> dict[str, str]:
    return {key: role for key, role in own_model.PLAN.items() if key != pattern}


def changed(change: Callable[[nn.Module], object]) -> nn.Module:
    module = own_model.Decoder(2, 24, 3)
    change(module)
    return module


def _in_layer(name: str, other: nn.Module) -> Callable[[nn.Module], object]:
    return lambda module: setattr(module.get_submodule("layers.1"), name, other)


class BareNorm(nn.Module):
    """Divides by the largest value, which is no statistic that can be summed."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class Inline(nn.Module):
    """A block that computes a feed-forward section by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)


ONE: dict[str, Any] = {"scheme": "megatron", "cols": 2}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, str] | None, str]] = {
    "no role": (decoder_ := lambda: own_model.Decoder(2, 64, 4), ONE, without("layers.*.mlp.2"),
        r"layers\.0\.mlp\.2\.weight and 3 more: nothing places it\. Give 'layers\.\*\.mlp\.2' a"),
    "a cell that no role can have": (lambda: changed(_in_layer("memory", nn.LSTM(24, 24))), ONE,
        own_model.PLAN, r"layers\.1\.memory\.weight_ih_l0"),
    "no plan": (decoder_, ONE, None, r"Decoder carries no plan for tensor parallelism"),
    "nothing matches": (decoder_, ONE, {**own_model.PLAN, "layers.*.mpl.0": "opening"},
        r"'layers\.\*\.mpl\.0' in the plan matches nothing"),
    "no such heads": (decoder_, ONE, {**own_model.PLAN, "layers.*.attention": "heads: heads"},
        r"'layers\.\*\.attention': no module that it matches has heads"),
    "no such role": (decoder_, ONE, {"words": "embeding"}, r"no role 'embeding'.*embedding"),
    "heads": (lambda: own_model.Decoder(2, 24, 3), ONE, own_model.PLAN,
        r"layers\.0\.attention\.n_heads=3: heads of .* that layout\.cols=2 divides"),
    "widths": (decoder_, {"scheme": "optimus", "rows": 3, "cols": 1}, own_model.PLAN,
        r"layers\.0\.mlp\.0: 64 inputs do not divide by layout\.rows=3"),
    "dropout": (lambda: changed(_in_layer("drop", nn.Dropout(0.1))), ONE, own_model.PLAN,
        r"layers\.1\.drop\.p=0\.1: torch draws other random numbers"),
    "batch norm": (lambda: changed(lambda module: setattr(module, "bn", nn.BatchNorm1d(24))),
        {"dp": 2}, {**own_model.PLAN, "bn": "replicated"}, r"bn: BatchNorm1d mixes samples"),
    "another class": (
        lambda: changed(lambda module: setattr(module, "head", nn.Bilinear(24, 24, 4))),
        ONE,
        own_model.PLAN,
        r"head: head needs a plain torch\.nn\.Linear",
    ),
    "another norm without weights": (lambda: changed(_in_layer("bare", BareNorm())),
        LAYOUTS["optimus"], own_model.PLAN,
        r"layers\.1\.bare: BareNorm is neither a LayerNorm nor an RMSNorm of .*use megatron_2d"),
    "a product that is a parameter": (decoder_, ONE, {**own_model.PLAN, "words.weight": "opening"},
        r"words\.weight is a parameter, and opening is for modules"),
    "one parameter, two roles": (decoder_, ONE, {**own_model.PLAN, "words": "replicated"},
        r"words\.weight and head\.weight are one parameter, and their roles are replicated and"),
    "inline": (lambda: nn.Sequential(Inline(), Inline()), {**ONE, "sequence_parallel": True},
        {"*.up": "opening", "*.down": "closing"},
        r"0\.up: activations are sharded between sections, and 0 also computes what is between"),
    "keys": (decoder_, {**ONE, "rows": 2}, own_model.PLAN, r"uses layout\.cols and cannot"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(case: str) -> None:
    build, layout, plan, said = REFUSED[case]
    module = build()
    before = {name: id(p) for name, p in module.named_parameters()}
    with pytest.raises(ConfigError, match=said):
        check(module, LayoutConfig(**layout), plan)
    assert before == {name: id(p) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("make", "layout", "said"),
    [
        (vit, {"pp": 2}, r"ViT.*: the network has no torch\.nn\.ModuleList of layers"),
        (lambda: (decoder()[0].half(), None, own_model.PLAN), {"pp": 2}, "parameters are float16"),
    ],
)
def test_networks_without_stages(make: Callable[[], Made], layout: Any, said: str) -> None:
    module, _, plan = make()
    with pytest.raises(ConfigError, match=said):
        gridformer.parallelize(module, layout, plan)


def test_a_batch_needs_tokens() -> None:
    module, _, plan = decoder()
    net = gridformer.parallelize(module, {"micro_batches": 3}, plan)
    with pytest.raises(ValueError, match="a batch has words, and no tokens"):
        net.train_batch({"words": torch.zeros(8, 4).long()}, own_model.loss_of)
    with pytest.raises(ValueError, match="8 samples here do not divide into 3 micro-batches"):
        net.train_batch(own_model.batch_of(0), own_model.loss_of)


def test_heads_of_keys_must_divide() -> None:
    module, _, _ = llama()
    with pytest.raises(ConfigError, match=r"k_proj: its 2 heads of width 8 do not divide by .*=4"):
        check(module, LayoutConfig(scheme="megatron", cols=4))


def small(name: str, **changes: Any) -> nn.Module:
    pytest.importorskip("transformers")
    from benchmarks.coverage.networks import build

    return build(name, changes)[0]


@pytest.mark.parametrize(
    ("name", "pattern", "role"),
    [
        ("gemma", "model.embed_tokens", "embedding"),  # scaled, and tied to the head
        ("olmo2", "model.layers.*.self_attn.k_norm", "replicated"),  # reads all heads
        ("esmc", "esmc.layers.*.self_attn.q_norm", "norm sharded"),  # reads a device's heads
        ("muse_glimmer_assistant", "layers.*.self_attn.q_norm", "summed"),  # reads one head
        ("deepseek_v32", "model.layers.*.self_attn.indexer", "summed"),  # chooses for all heads
        ("hy_v4", "model.layers.*.self_attn.q_a_proj", "summed"),  # local_params are not its own
        ("aria_text", "model.layers.*.mlp.experts.down_proj", "closing transposed"),
    ],
)
def test_roles_that_transformers_leaves_open(name: str, pattern: str, role: str) -> None:
    network = small(name, num_key_value_heads=4)
    assert (default_plan(network) or {})[pattern] == role
    check(network, LayoutConfig(**ONE))


def test_norms_are_found_by_what_experts_return() -> None:
    """Granite's plan has no other closing product; heads are not sharded."""
    roles = check(small("granitemoe"), LayoutConfig(**LAYOUTS["optimus"]))
    assert roles.modules["model.layers.0.input_layernorm"] == PlanRole("norm")


class Sums(nn.Embedding):
    """Reads the table itself, which is sharded elsewhere."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) - self.weight.mean(0)


def test_what_reads_its_table_otherwise_is_no_table() -> None:
    assert is_table(nn.Embedding(3, 4))
    assert not is_table(Sums(3, 4))
    assert not is_table(nn.Embedding(3, 4, max_norm=1.0))


def test_what_is_outside_sections_is_replicated_by_default() -> None:
    """Where devices have whole activations between sections; Doge scales its residual in layers."""
    roles = roles_of(small("doge"), None)
    assert roles.parameters["model.layers.0.input_residual"] == PlanRole("replicated")
    assert "model.layers.0.self_attn.A" in roles.not_placed, "it is part of a section"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router_jitter_noise": 0.1}, r"jitter_noise=0\.1: torch draws"),
        (
            {"intermediate_size": 15},
            r"experts\.gate_up_proj \[8, 30, 16\]: 15 does not divide by layout\.cols=2",
        ),
    ],
    ids=["noise", "widths"],
)
def test_experts_are_refused(changes: dict[str, Any], said: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**{**sizes, **heads, **changes})
    with pytest.raises(ConfigError, match=said):
        check(transformers.MixtralForCausalLM(config), LayoutConfig(**ONE))


def test_roles() -> None:
    assert PlanRole.of("opening: 64, 16, 16") == PlanRole("opening", (64, 16, 16))
    assert PlanRole.of("opening: 2 parts").widths(10) == (5, 5)
    assert PlanRole.of("opening gathered") == PlanRole.of("head")
    assert PlanRole.of("heads: n_heads, width").attributes == ("n_heads", "width")
    roles = roles_of(own_model.Decoder(2, 64, 4), own_model.PLAN)
    assert roles.lists == ["layers"]
    assert roles.modules["layers.1.norm2"] == roles.modules["norm"] == PlanRole("norm")
