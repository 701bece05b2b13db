"""A decoder in plain torch, trained by several processes on any layout, with the losses of one.

    torchrun --nproc-per-node 2 examples/own_model.py scheme=megatron cols=2
    torchrun --nproc-per-node 4 examples/own_model.py scheme=optimus rows=2 cols=2
    torchrun --nproc-per-node 4 examples/own_model.py dp=2 dp_mode=fsdp pp=2 micro_batches=2

Before a GPU is rented, on this machine's processor:

    gridformer prove examples.own_model:network layout.scheme=megatron layout.cols=2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gridformer

WORDS, TOKENS = 512, 32

PLAN = {
    "words": "embedding",
    "positions": "replicated",
    "layers.*.attention": "heads: n_heads",
    "layers.*.attention.qkv": "opening: 3 parts",
    "layers.*.attention.out": "closing",
    "layers.*.mlp.0": "opening",
    "layers.*.mlp.2": "closing",
    "head": "head",
}


class Attention(nn.Module):
    def __init__(self, h: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, self.n_heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, -1))
        return out


class Layer(nn.Module):
    def __init__(self, h: int, n_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.attention = Attention(h, n_heads)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Maps tokens [b, s] to logits [b, s, WORDS]."""

    def __init__(self, n_layers: int, h: int, n_heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, h), nn.Embedding(TOKENS, h)
        self.layers = nn.ModuleList(Layer(h, n_heads) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = self.positions.weight[: tokens.shape[1]]
        if position_ids is not None:  # rows of devices divide sequences
            places = self.positions(position_ids)
        x = self.words(tokens) + places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch_of(step: int, size: int = 8) -> dict[str, Tensor]:
    """Returns tokens and next ones [size, TOKENS], which count on in steps of 1 to 4."""
    draw = torch.Generator().manual_seed(step)
    first, by = (torch.randint(1, n, (size, 1), generator=draw) for n in (WORDS, 5))
    words = (first + by * torch.arange(TOKENS + 1)) % WORDS
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}


def loss_of(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def network() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, str]]:
    """Returns what `gridformer prove` compares: a network, its inputs and its plan."""
    return Decoder(n_layers=2, h=64, n_heads=4), (batch_of(0)["tokens"],), PLAN


def main() -> None:
    parser = argparse.ArgumentParser(description="A decoder in plain torch on any layout.")
    parser.add_argument("layout", nargs="*", metavar="KEY=VALUE", help="such as dp=2 or cols=2")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    dist.init_process_group("gloo")  # with GPUs: "nccl", and the network on this process's GPU
    torch.manual_seed(0)  # the same weights on every process
    decoder = Decoder(n_layers=2, h=64, n_heads=4)
    net = gridformer.parallelize(decoder, dict(word.split("=") for word in args.layout), PLAN)
    optimizer = net.optimizer(torch.optim.AdamW, lr=3e-3)
    for step in range(args.steps):
        loss = net.train_batch(batch_of(step), loss_of)  # the same batch on every process
        net.clip_gradients(1.0)
        optimizer.step()
        net.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}  loss {loss:.6f}", flush=True)
    state = net.state_dict()  # whole, with the network's own names
    if dist.get_rank() == 0:
        Decoder(n_layers=2, h=64, n_heads=4).load_state_dict(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
