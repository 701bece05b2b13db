"""The sides that `benchmarks.gpu single` compares: gridformer and Hugging Face's transformers.

`benchmarks.gpu.torchtitan_side` holds a third one. All train a GPT-2 or a Llama in float32, or each
with its own usual mixed precision. gridformer then has bfloat16 activations throughout, including
the residual stream, over float32 parameters. The others run as Hugging Face's Trainer does with
bf16=True: float32 parameters under autocast, so that their residual stream stays float32. The
optimizer (fused AdamW), its settings, clipping, schedule, batches and initial weights are the same.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # keeps transformers from downloading anything

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.checkpoint.convert.kinds import kinds_of
from gridformer.checkpoint.convert.table import Kind
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.compile import compile_model
from gridformer.train.in_flight_steps import StartedStep
from gridformer.train.optimizer import Updates
from gridformer.train.step import Stepper, learning_rate
from gridformer.utils.batch import next_words

HFCompile = Literal["blocks", "whole"]


class Side(Protocol):
    """One implementation, with its weights and optimizer.

    It is prepared for compilation; `torch.compiler.set_stance("force_eager")` runs it eagerly.
    """

    name: str

    def step(self, number: int, batch: Tensor) -> tuple[SupportsFloat, SupportsFloat]:
        """Run one step on tokens [b, s+1]; return loss and gradient norm before the update."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state, which stay between steps."""
        ...

    def rest(self) -> None:
        """Free gradients while the other side has its turn."""
        ...


@dataclass(frozen=True)
class _Later:
    """A number of a step's result, which is waited for when it is asked for."""

    started: StartedStep
    name: str

    def __float__(self) -> float:
        return float(getattr(self.started.result(), self.name))


class Gridformer:
    """`build_parallel` and the trainer's own Stepper, on the single scheme."""

    name = "gridformer"

    def __init__(
        self, config: ModelConfig, train: TrainConfig, device: torch.device, backend: str
    ) -> None:
        self.model = build_parallel(config, LayoutConfig(), Axes(), train.seed, device, train.dtype)
        compile_model(self.model, backend)
        self.stepper = Stepper(self.model, train, Axes())
        self.run_step = self.stepper.start_ahead

    def step(self, number: int, batch: Tensor) -> tuple[SupportsFloat, SupportsFloat]:
        # All rows, in order: to index by an array would wait for the device, as training does not.
        started = self.run_step(number, lambda rows: next_words(batch))
        return _Later(started, "loss"), _Later(started, "grad_norm")

    def held_bytes(self) -> int:
        return _bytes(self.model, self.stepper.updates)

    def rest(self) -> None:
        self.model.zero_grad(set_to_none=True)


class PlainTorch:
    """Another library's model, trained as torch's documentation shows.

    Args:
        net: The model; of its parameters, matrices decay.
        loss: Maps tokens and targets [b, s] to the mean loss.
        compiled: The modules that are compiled, each by itself.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module,
        compiled: Iterable[nn.Module],
        train: TrainConfig,
        device: torch.device,
        backend: str,
    ) -> None:
        self.net: Any = net
        self.loss, self.train, self.device = loss, train, device
        for module in compiled:
            module.compile(backend=backend, dynamic=False)
        matrices = [p for p in net.parameters() if p.dim() > 1]
        vectors = [p for p in net.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            fused=True,
        )

    def step(self, number: int, batch: Tensor) -> tuple[SupportsFloat, SupportsFloat]:
        self.optimizer.zero_grad(set_to_none=True)
        half = self.train.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            loss = self.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.train.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.train)
        self.optimizer.step()
        return loss.detach(), norm

    def held_bytes(self) -> int:
        return _bytes(self.net, self.optimizer)

    def rest(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class _HuggingFaceLoss(nn.Module):
    """What their models compute given labels: logits, and their mean cross entropy in float32.

    Targets are already shifted, so that all sides predict the same s tokens of a sequence.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.transformer = net.base_model
        self.head = HeadAndLoss(net.lm_head)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSH = self.transformer(input_ids=tokens_BS, use_cache=False).last_hidden_state
        loss: Tensor = self.head(x_BSH, targets_BS)
        return loss


class HeadAndLoss(nn.Module):
    """A separate module, because torch.compile does not compile a bare nn.Linear."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.lm_head = lm_head

    def forward(self, x_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self.lm_head(x_BSH)
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())


class HuggingFace(PlainTorch):
    """transformers' model, built from a config (no download) and run as a Trainer does.

    With bfloat16 that is a Trainer with bf16=True.

    Args:
        how: `blocks` compiles each block, the head and the loss, as gridformer does; `whole`
            compiles the whole model at once, as Trainer's torch_compile=True does. Before torch
            2.14, `whole` makes transformers build an explicit attention mask, which rules out
            flash attention.
    """

    name = "Hugging Face"

    def __init__(
        self,
        config: ModelConfig,
        train: TrainConfig,
        device: torch.device,
        backend: str,
        how: HFCompile = "blocks",
    ) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        with device:
            net = causal_model(config).train()
        loss, base = _HuggingFaceLoss(net), net.base_model
        parts = [*(base.h if config.family == "gpt2" else base.layers), loss.head]
        super().__init__(net, loss, [loss] if how == "whole" else parts, train, device, backend)

    def take_weights(self, model: nn.Module, config: ModelConfig) -> None:
        """Copy the weights of gridformer's model."""
        state = hugging_face_state(model, config)
        ours = dict(self.net.named_parameters())
        assert state.keys() == ours.keys(), state.keys() ^ ours.keys()
        with torch.no_grad():
            for name, value in state.items():
                ours[name].copy_(value)


def hugging_face_state(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters of gridformer's model under the names of Hugging Face's."""
    ours = dict(model.named_parameters())
    return {
        name: tensor
        for entry in _kind(config).entries(config)
        for name, tensor in zip(entry.theirs, entry.form.theirs(ours[entry.ours]))
    }


def _kind(config: ModelConfig) -> Kind:
    """Return the kind of model that it is there; a family has several."""
    return next(kind for kind in kinds_of(config) if isinstance(kind.write_config(config), dict))


def causal_model(config: ModelConfig) -> Any:
    """Return transformers' new model of a config of ours, with fused attention."""
    import transformers

    kind = _kind(config)
    keys = kind.write_config(config)
    assert isinstance(keys, dict)
    more = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    their_config = transformers.AutoConfig.for_model(
        kind.model_type, attn_implementation="sdpa", **{**keys, **more}
    )
    return transformers.AutoModelForCausalLM.from_config(their_config)


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer | Updates) -> int:
    state: Iterable[Any] = (v for s in optimizer.state.values() for v in s.values())
    tensors = [*model.parameters(), *(v for v in state if isinstance(v, Tensor))]
    return sum(t.numel() * t.element_size() for t in tensors)
