"""torchtitan's Llama as a side of `benchmarks.gpu single`, where the package is installed.

torchtitan 0.3 runs attention of its language models with FlexAttention or a variable-length kernel,
which need a GPU. Here its Llama has torchtitan's own module for PyTorch's fused attention, which
runs everywhere and which the other sides also use. Its trainer needs one process group and data of
its own; the step here is the same as Hugging Face's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.sides import HeadAndLoss, PlainTorch, hugging_face_state
from gridformer.config import ModelConfig, TrainConfig


def torchtitan_runs(config: ModelConfig) -> bool:
    """Return whether torchtitan is installed and has the model in its Llama."""
    plain = not (config.qk_norm or config.qkv_bias or config.window or config.rope_scaling)
    return bool(find_spec("torchtitan")) and config.family == "llama" and plain


class Torchtitan(PlainTorch):
    """torchtitan's Llama 3, with the sizes of a config of ours."""

    name = "torchtitan"

    def __init__(
        self, config: ModelConfig, train: TrainConfig, device: torch.device, backend: str
    ) -> None:
        from torchtitan.models.llama3 import Llama3Model

        self.sizes = _sizes(config)
        with device:
            net: Any = Llama3Model(self.sizes)
            net.init_states()
        loss = _Loss(net)
        parts = [*net.layers.values(), loss.head]
        super().__init__(net.train(), loss, parts, train, device, backend)

    def take_weights(self, model: nn.Module, config: ModelConfig) -> None:
        """Copy the weights of gridformer's model, through their reader of Hugging Face's."""
        from torchtitan.models.llama3 import Llama3StateDictAdapter

        state = {name: x.detach() for name, x in hugging_face_state(model, config).items()}
        self.net.load_state_dict(Llama3StateDictAdapter(self.sizes, None).from_hf(state))


class _Loss(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.head = net, HeadAndLoss(net.lm_head)
        net._skip_lm_head = True  # as torchtitan's own losses do that hold the head

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss: Tensor = self.head(self.net(tokens_BS), targets_BS)
        return loss


def _sizes(config: ModelConfig) -> Any:
    """Return torchtitan's config of a model. `take_weights` replaces all initial values."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    h, v = config.hidden_size, config.vocab_size
    ones: dict[str, Any] = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(
        dim=config.head_width, max_seq_len=config.max_seq_len, theta=config.rope_theta
    )

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=h, eps=config.norm_eps, param_init=ones)

    def layer() -> Any:
        attention = make_gqa_config(
            dim=h,
            n_heads=config.n_heads,
            n_kv_heads=config.kv_heads,
            head_dim=config.head_width,
            wqkv_param_init=ones,
            wo_param_init=ones,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=rope,
        )
        feed_forward = make_ffn_config(
            dim=h, hidden_dim=config.ffn_size, w1_param_init=ones, w2w3_param_init=ones
        )
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=feed_forward
        )

    return Llama3Model.Config(
        dim=h,
        vocab_size=v,
        enable_weight_tying=config.tied_head,
        tok_embeddings=Embedding.Config(num_embeddings=v, embedding_dim=h, param_init=ones),
        norm=norm(),
        lm_head=Linear.Config(in_features=h, out_features=v, param_init=ones),
        layers=[layer() for _ in range(config.n_layers)],
    )
