"""Networks of others as a family: the language model of a Hugging Face folder, or of a function.

Its code runs as it is. What gridformer needs of it is the list of its layers, which are the links
of a pipeline. `gridformer.parallel.network` replaces its products, tables and norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig, factory
from gridformer.config.factory import path_of_layers
from gridformer.models.blocks import KVCache, Layer
from gridformer.models.model import Activations, Link, Model, held_layers
from gridformer.models.network_calls import POSITIONS, AttentionAlone, attend_in, attending
from gridformer.utils.batch import Batch
from gridformer.utils.errors import UserError, require

_WEIGHTS = "*.safetensors"


class NetworkLayer(Layer):
    """Comes before the class of a layer, whose activations are then recomputed as configured."""

    recompute: Any
    attending_by: AttentionAlone | None
    cast: Callable[[Tensor], Tensor]
    leaving: list[Tensor]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], _Rest):
            return args[0].run(super().__call__, hidden_states)
        # A network may scale what it gets for embeddings, as the first stage did already.
        hidden_states = self.cast(self.__dict__.pop("entering", hidden_states))
        rest = _Rest(args, kwargs, attending(self.attending_by))
        out = self.recompute.block(self, hidden_states, rest)
        if "leaving" in self.__dict__:
            self.leaving.append(out)
        return (out, *rest.more) if rest.several else out


class _Passing(nn.Module):
    """Stands for a layer that another stage runs, whose numbers and kinds code around it reads.

    In a stage without layers, one of them makes `changes` to what enters layers.
    """

    leaving: list[Tensor]

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        kind = {k: v for k in dir(layer) if isinstance(v := getattr(type(layer), k, None), str)}
        vars(self).update({k: v for k, v in (kind | vars(layer)).items() if not k.startswith("_")})

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        x = self.__dict__.pop("entering", x)
        if "leaving" in self.__dict__:
            for change in self.__dict__.pop("changes"):
                x = change(x)
            self.leaving.append(x)
        return x


class _StageEndError(Exception):
    """A network of tokens has run the last layer of a stage, behind which nothing is to run."""


class _LastResult(list[Tensor]):
    def append(self, x: Tensor) -> None:
        super().append(x)
        raise _StageEndError


class _Rest:
    """What a layer gets besides hidden states, and what it returns besides them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], attending: Any) -> None:
        self.args, self.kwargs, self.attending = args, kwargs, attending
        self.several, self.more = False, ()

    def run(self, layer: Callable[..., Any], x: Tensor) -> Tensor:
        with self.attending:
            out = layer(x, *self.args, **self.kwargs)
        self.several = isinstance(out, tuple)
        if self.several:
            out, *more = out
            self.more = tuple(more)
        result: Tensor = out
        return result


@cache
def _layer_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (NetworkLayer, kind), {"__module__": kind.__module__})


class NetworkModel(Model):
    """A language model of others: its modules and parameters have their own names.

    Hidden states of the whole model, and of the last stage of a pipeline, are logits.

    Attributes:
        module: The network, which shares its submodules with this one.
        trunk: The part of it that runs the layers.
        path: The name of the list of layers, and `stack` that in the trunk.
        orders: For parameters whose rows or columns have another order than in the network, the
            dimension and the order; see gridformer.parallel.network.
        sharding: What gridformer.parallel.network has made of it.
        beside_layers: What a stage without layers does with what enters them, by its link.
        outside: The modules outside the layers with parameters, for a network of tokens.
        reads_embeddings: Whether it is one of transformers, which can begin with embeddings, or
            continue texts. Others map whole tokens to logits.
    """

    module: Any
    trunk: Any
    sharding: Any
    outside: dict[str, nn.Module]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        module = _new_network(config)
        own = {*self._modules} & {*module._modules}
        assert not own, f"{type(module).__name__} has modules of the names {own}"
        module._modules.update(self._modules)
        self._modules, self._parameters = module._modules, module._parameters
        self._buffers = module._buffers
        vars(self)["module"] = module  # it is not one of the submodules
        self.orders: dict[str, tuple[int, Tensor]] = {}
        self.beside_layers: dict[str, Callable[[Tensor], Tensor]] = {}
        self.path = path_of_layers(module)
        self.reads_embeddings = self.keeps_keys = hasattr(module, "get_input_embeddings")
        self.attention = AttentionAlone(config, self.dropout_rng)
        self.attention.recompute = self.recompute
        attend_in(module, self.attention)
        above, _, self.stack = self.path.rpartition(".")
        trunk = module.get_submodule(above)
        vars(self)["trunk"] = trunk
        self._plain = [
            name
            for name, part in module.named_modules()
            if part._parameters and not name.startswith(f"{self.path}.")
        ]
        vars(self)["outside"] = {
            name: module.get_submodule(name) for name in self._plain if not self.reads_embeddings
        }
        children = [name for name, _ in trunk.named_children()]
        self._first = set(children[: children.index(self.stack)])
        held, layers = held_layers(), trunk.get_submodule(self.stack)
        self._passing = {name: _Passing(layer) for name, layer in layers.named_children()}
        for name, layer in [*layers.named_children()]:
            if held is not None and {f"layers.{name}", f"{self.path}.{name}"}.isdisjoint(held):
                del layers._modules[name]
                continue
            kind: Any = type(layer)
            layer.__class__ = _layer_of(kind)
            layer.recompute, layer.cast = self.recompute, self._cast
            vars(layer)["attending_by"] = None if self.reads_embeddings else self.attention

    def links(self) -> list[Link]:
        before, behind = self._outside()
        if self.reads_embeddings:
            behind += before[:1] * self.config.tied_head
        return [
            Link("embedding", (*before,)),
            *(Link(f"layers.{i}", (f"{self.path}.{i}",)) for i in range(self.config.n_layers)),
            Link("head", (*behind, "loss")),
        ]

    def _outside(self) -> tuple[list[str], list[str]]:
        """Returns the modules with parameters that run before the layers, and behind them."""
        if not self.reads_embeddings:
            chain = factory.chain_of(self.config.factory)
            return [*chain.before], [*chain.behind]
        above = self.path.rpartition(".")[0]
        before, behind = list[str](), list[str]()
        for name in self._plain:
            inside = name.removeprefix(f"{above}." if above else "").split(".")[0]
            (before if inside in self._first and name.startswith(above) else behind).append(name)
        return before, behind

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        hidden, _ = Activations.taken(entering)
        names = self._link_names() if links is None else links
        tokens_BS = batch["tokens"]
        entering = None if "embedding" in names else hidden
        positions = batch.get("positions")
        if positions is None:
            positions = self.sequence.positions(tokens_BS.shape[1], tokens_BS.device).unsqueeze(0)
        if not self.reads_embeddings:
            placed = {POSITIONS: positions} if self.sequence.n > 1 else {}
            with self._only(names, "head" not in names, entering) as leaving:
                try:
                    return Activations(factory.logits_of(self.module(tokens_BS, **placed)))
                except _StageEndError:
                    return Activations(leaving[0])
        if "embedding" in names:
            hidden = self._cast(self.module.get_input_embeddings()(tokens_BS))
        inputs = {"inputs_embeds": hidden, "position_ids": positions + start}
        inputs |= {"use_cache": False, "return_dict": True}
        if caches:
            inputs["past_key_values"] = _cache_of(caches, start)
        if "head" in names:
            with self._only(names, False, entering):
                return Activations(self.module(**inputs).logits)
        with self._only(names, True, entering) as leaving:
            self.trunk(**inputs)
            return Activations(leaving[0])

    @contextmanager
    def _only(
        self, names: Collection[str], without_tail: bool, entering: Tensor | None
    ) -> Iterator[list[Tensor]]:
        """Runs the layers of some links alone, from what enters them; yields what leaves them.

        They run without what is behind them in the trunk, if another stage has that.
        """
        if self.stages or without_tail:
            layers = self.trunk.get_submodule(self.stack)
            every, around = layers._modules, self.trunk._modules
            mine = {n: m for n, m in every.items() if f"layers.{n}" in names}
            layers._modules = self._passing | mine  # in their order
            here: list[Any] = [*mine.values()] or [*layers.children()][:1]
            if not mine:
                beside = self.beside_layers
                here[0].changes = [self._cast, *(beside[name] for name in names if name in beside)]
            if entering is not None:
                here[0].entering = entering
            ends = without_tail and not self.reads_embeddings
            leaving = here[-1].leaving = _LastResult() if ends else list[Tensor]()
            if without_tail and not ends:
                above = f"{self.path.rpartition('.')[0]}."
                tail = [n.removeprefix(above) for n in self._outside()[1] if n.startswith(above)]
                self.trunk._modules = around | {name: nn.Identity() for name in tail}
            try:
                yield leaving
            finally:
                del here[-1].leaving
                layers._modules, self.trunk._modules = every, around
            return
        yield []

    def token_logits(
        self, hidden_BSH: Tensor, table: Tensor | None = None, padded: bool = False
    ) -> Tensor:
        return hidden_BSH

    def before_head(self) -> tuple[nn.Module, ...]:
        return ()

    def losses_of(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"tokens": self.loss(hidden_BSH, batch["targets"])}

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:
        """Allocates buffers, such as the frequencies of rotary positions, as transformers does.

        It also initializes parameters, so call it before they are allocated. Those of networks
        that are not of transformers are read from a new one. The code of these also runs modules
        that other stages hold: they get zeros, and nothing reads their results.
        """
        here = {name for name, _ in self.named_modules(remove_duplicate=False)}
        for name, part in self.outside.items():
            for leaf, p in [*part.named_parameters(recurse=False)] if name not in here else ():
                del part._parameters[leaf]
                vars(part)[leaf] = torch.zeros((), device=device).expand(p.shape)
            above, _, leaf = name.rpartition(".")
            self.get_submodule(above)._modules.setdefault(leaf, part)
        those = [one for one in self.module.modules() if hasattr(one, "_init_weights")]
        innermost = {part: one for one in those for part in one.modules()}
        for part, owner in innermost.items():
            for name, buffer in [*part.named_buffers(recurse=False)]:
                part._buffers[name] = torch.empty_like(buffer, device=device)
                if buffer.is_floating_point():
                    part._buffers[name].fill_(torch.nan)
            if part._buffers:
                with device:
                    owner._init_weights(part)
        for part in self.modules() if not those else ():
            for name, buffer in [*part.named_buffers(recurse=False)]:
                part._buffers[name] = torch.empty_like(buffer, device=device)
        self._read_buffers()

    def _read_buffers(self) -> None:
        """Reads buffers that belong to the weights, or else those that only constructors set."""
        real = [(n, b) for n, b in self.module.named_buffers() if type(b) is Tensor]
        stored = self.stored_buffers() if self._has_weights() else {}
        new = bool(self.config.factory)
        if wanted := [(n, b) for n, b in real if new or n in stored or b.isnan().any()]:
            read = self.initial_values(0)
            for name, buffer in wanted:
                with suppress(KeyError):  # as in transformers, it may be newer than the weights
                    buffer.copy_(read(name))

    def stored_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are stored with weights."""
        stored = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in stored}

    def initial_values(self, seed: int) -> Callable[[str], Tensor]:
        """Returns what gives the initial values of a parameter by its name.

        They come from the weights in the folder, or are new ones of the network, which every
        process then builds whole in host memory. It also loads a network whole if weights have
        other names in the folder, as those of experts, which transformers joins.

        Raises:
            UserError: The weights in the folder do not have a parameter.
        """
        folder = Path(self.config.folder)
        if self._has_weights():
            stored = _Stored(folder, self.orders)
            if all(stored.has(name) for name, _ in self.named_parameters()):
                return stored
            values = _loaded(folder)
            return lambda name: _ordered(values[name], self.orders.get(name))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            whole = _new_network(self.config, on_meta=False)
        values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        return lambda name: _ordered(values[name].detach(), self.orders.get(name))

    def _has_weights(self) -> bool:
        folder = self.config.folder
        return bool(folder) and any(Path(folder).glob(_WEIGHTS))


def _ordered(values: Tensor, order: tuple[int, Tensor] | None) -> Tensor:
    return values if order is None else values.index_select(*order)


class _Stored:
    """Reads parameters from the safetensors files of a folder, one at a time."""

    def __init__(self, folder: Path, orders: dict[str, tuple[int, Tensor]]) -> None:
        from safetensors import safe_open

        self._orders = orders
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob(_WEIGHTS))]
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def has(self, name: str) -> bool:
        return self._known(name) is not None

    def _known(self, name: str) -> str | None:
        base = name.partition(".")[2]  # the weights of a network without its head
        return next((n for n in (name, base) if n in self._where), None)

    def __call__(self, name: str) -> Tensor:
        known = self._known(name) or name
        return _ordered(self._where[known].get_tensor(known), self._orders.get(name))


def _loaded(folder: Path) -> dict[str, Tensor]:
    """Returns all parameters of a folder's network, as transformers reads them.

    Raises:
        UserError: Some are not there.
    """
    kind, _ = class_of(str(folder))
    network, said = kind.from_pretrained(
        folder, dtype="auto", use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(said["missing_keys"]):
        raise UserError(f"{folder}: its weights do not have {', '.join(missing[:3])}")
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    return parameters | dict(network.named_buffers())


@lru_cache(maxsize=8)
def _class_of(folder: str) -> tuple[Any, Any]:
    require("transformers", "a Hugging Face folder", "hf")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}: {error}") from None
    for key in [*vars(config)]:
        if ("dropout" in key or key.endswith("pdrop")) and getattr(config, key):
            setattr(config, key, 0.0)
    name = (getattr(config, "architectures", None) or ["no architecture"])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(f"{folder}: {name} is not a model of the installed transformers")
    return kind, config


def class_of(folder: str) -> tuple[Any, Any]:
    """Returns the class of transformers that a folder names, and its config without dropout.

    No code in the folder is run.

    Raises:
        UserError: There is no such class.
    """
    kind, config = _class_of(folder)
    return kind, copy.deepcopy(config)


def _new_network(sizes: ModelConfig, on_meta: bool = True) -> Any:
    if sizes.factory:
        network = factory.on_meta(sizes.factory).module if on_meta else None
        network = factory.copied(network) if network else factory.make(sizes.factory).module
        layers = network.get_submodule(path_of_layers(network))
        for name in [*layers._modules][sizes.n_layers :]:  # a record of a step needs few
            del layers._modules[name]
        return network
    kind, config = class_of(sizes.folder)
    config.num_hidden_layers = sizes.n_layers
    if getattr(config, "layer_types", None):
        with suppress(AttributeError):  # Jamba's follow from the number of layers
            config.layer_types = config.layer_types[: sizes.n_layers]
    if not on_meta:
        return kind(config)
    with torch.device("meta"):
        return kind(config)


def _cache_of(caches: Sequence[KVCache], start: int) -> Any:
    """Returns the caches of layers as transformers' code reads them."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class OfLayer(CacheLayerMixin):
        is_compileable = is_sliding = False
        is_initialized = True

        def __init__(self, cache: KVCache) -> None:
            super().__init__()
            self.cache = cache

        def lazy_initialization(self, *_: Any) -> None: ...

        def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return self.cache.append(k, v)

        def get_seq_length(self) -> int:
            return start

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return start + query_length, 0

        def get_max_length(self) -> int:
            return -1

        get_max_cache_shape = get_max_length

    return Cache(layers=[OfLayer(cache) for cache in caches])
