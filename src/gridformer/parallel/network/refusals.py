"""What keeps a network from running on a layout: sentences, each with a remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import models
from gridformer.config import (
    LayoutConfig,
    ModelConfig,
    RunConfig,
    any_of,
    factory,
    parse_run,
)
from gridformer.models import network_calls
from gridformer.parallel.network import modules as parts
from gridformer.parallel.network.plan import (
    PlanRole,
    Roles,
    described,
    holder_of,
    is_conv1d,
    is_table,
    roles_of,
)
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import check_layout, layout_problems
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import format_value

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# What layers read whole, by the ends of its names, beside a part of tokens (s) or of features (h).
_READ_WHOLE = {"token_mask": ("s",), "block_states": ("s", "h")}
_WHOLE = "use parallelize() with pp=1 and rows_over=batch"


def runs_as_a_family(layout: LayoutConfig) -> bool:
    """Whether a network runs link by link on a layout, or on some tokens of each sequence."""
    return layout.pp > 1 or layout.rows_over == "sequence"


def run_of(module: nn.Module, layout: LayoutConfig, plan: Mapping[str, str] | None) -> RunConfig:
    """Returns a run of a network that maps tokens to logits; for errors see `parallelize`."""
    parts = layout.dp * layout.rows * layout.cols * layout.branches * layout.micro_batches
    dtypes = {p.dtype for p in module.parameters()}
    if len(dtypes) > 1 or not dtypes < {torch.float32, torch.float64}:
        said = any_of(str(dtype).removeprefix("torch.") for dtype in dtypes)
        what = "stages, and rows over the sequence, need"
        raise ConfigError(f"parameters are {said}: {what} all float32 or all float64")
    model: dict[str, Any] = {"factory": factory.give(module, plan)}
    if path := factory.path_of_layers(module):
        model["n_layers"] = len(module.get_submodule(path)._modules)
    sections = {
        "model": model,
        "data": {"path": ".", "seq_len": 2 * spec_of(layout).sequence_parts(layout)},
        "layout": layout.model_dump(exclude_unset=True),
        "train": {"global_batch": parts, "dtype": str(*dtypes).removeprefix("torch.")},
    }
    return check_layout(parse_run({"name": "parallelize", **sections}))


def check(module: nn.Module, layout: LayoutConfig, plan: Mapping[str, str] | None = None) -> Roles:
    """Returns the roles of a network's parts; for arguments and errors see `parallelize`."""
    roles = roles_of(module, plan)
    if problems := [
        *layout_problems(layout),
        *_unsupported(layout),
        *_problems(module, roles, layout),
    ]:
        raise ConfigError(*problems)
    return roles


def run_problems(run: RunConfig) -> Iterator[str]:
    """Yields what keeps the network of a run, and its training, from a layout."""
    module, pp = _unlike_layers(run.model), run.layout.pp
    if run.model.factory:
        yield from _factory_problems(run)
    of_tokens = run.model.factory and not hasattr(module, "get_input_embeddings")
    kinds = [kind.__name__ for kind in type(module).__mro__]
    if not of_tokens and not any(n.endswith(("ForCausalLM", "LMHeadModel")) for n in kinds):
        yield f"{kinds[0]}: it is no language model: {_WHOLE}"
        return
    # What is known of a function then is known while a step is recorded.
    problem = factory.chain_of(run.model.factory).problem if of_tokens else ""
    if pp > 1 and problem:
        yield f"layout.pp={pp}: {run.model.factory} is no chain of layers, {problem}: use pp=1"
    if pp > 1 and not of_tokens and not getattr(module, "supports_pp_plan", False):
        yield f"layout.pp={pp}: transformers has no plan for {type(module).__name__}: use pp=1"
    one_stage = run.layout.model_copy(update={"pp": 1, "stages_per_rank": 1})
    config, table = getattr(module, "config", None), getattr(module, "get_input_embeddings", None)
    words = {getattr(config, f"vocab_size{key}", 0) for key in ("", "_per_layer_input")}
    for name, part in module.named_modules():
        parts.known_norm(part)  # which are then known to records of a step
        again = table and isinstance(part, nn.Embedding) and part is not table()
        if again and part.num_embeddings in words:
            yield f"{name} looks up tokens, and layers get embeddings alone: {_WHOLE}"
    layers = module.get_submodule(factory.path_of_layers(module)).children()
    read = {name for layer in layers for name in inspect.signature(layer.forward).parameters}
    for name in sorted(read):
        if "input_ids" in name:
            yield f"layers read {name}, and get embeddings alone: {_WHOLE}"
        elif pp > 1 and name.startswith(("prev_", "block_states")):
            yield f"layout.pp={pp}: layers read {name} of others, not hidden states alone: use pp=1"
    roles = roles_of(module, run.model.plan or None)
    attends = network_calls.attends_plainly(module) and not roles.latent
    if of_tokens and run.layout.rows_over == "sequence":
        mixing = network_calls.mixing_of_tokens(module)
        if mixing:
            yield f"layout.rows_over=sequence: {run.model.factory}: {mixing}: use rows_over=batch"
        attends = True
    yield from _unsupported(one_stage, attends)
    if pp > 1 and len(roles.lists) > 1:
        yield f"layout.pp={pp}: {' and '.join(roles.lists)} are no chain of layers: use pp=1"
    yield from _problems(module, roles, one_stage, pp)
    if run.data.document_mask:
        yield "data.document_mask=true: networks of others read no documents: use false"


def _factory_problems(run: RunConfig) -> Iterator[str]:
    """The network of a function must be that of the sizes, and read sequences as long as these."""
    model, module = run.model, factory.on_meta(run.model.factory).module
    n_layers = len(module.get_submodule(factory.path_of_layers(module))._modules)
    if model.n_layers > n_layers:
        yield f"model.n_layers={model.n_layers}: {model.factory} has {n_layers}; use that"
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen and model.factory not in factory.given:
        yield f"{frozen[0]} is frozen, and a run updates all parameters: use parallelize()"
    for name, part in module.named_modules():
        for key in [key for key, value in vars(part).items() if isinstance(value, Tensor)]:
            place = f"{name}.{key}".lstrip(".")
            yield f"{place} is a tensor, and neither parameter nor buffer: call register_buffer"
    if hasattr(module, "get_input_embeddings"):
        return
    try:
        words, width, _ = factory.probed(model.factory, run.seq_len)
    except UserError as error:
        yield f"data.seq_len={run.seq_len}: {error}"
        return
    for key, size in {"hidden_size": width, "vocab_size": words}.items():
        if getattr(model, key) != size and size:
            yield f"model.{key}={getattr(model, key)}: {model.factory} has {size}; use that"


@lru_cache(maxsize=8)
def _unlike_layers(config: ModelConfig) -> Any:
    """Returns the network of a config on the meta device, with the first of equal layers alone."""
    with torch.device("meta"):
        network = models.NetworkModel(config)
    layers, seen = network.module.get_submodule(network.path), set()
    for name, layer in [*layers.named_children()]:
        kind = tuple((n, p.shape) for n, p in layer.named_parameters())
        if kind in seen:
            delattr(layers, name)
        seen.add(kind)
    return network.module


def _unsupported(layout: LayoutConfig, attends: bool = False) -> Iterator[str]:
    """Yields what is not for any network; rows divide tokens if gridformer `attends`."""
    boundary = spec_of(layout).boundary(layout)
    known = {"b": "branch"}.get(boundary.activation_layout, "col") == boundary.axis
    known = known and (not boundary.h_over or layout.stationary != "auto")
    refused: dict[str, tuple[object, str]] = {
        "scheme": (layout.common == "all" and not known, "use scheme=megatron"),
        "common": (layout.common != "all", "use common=all"),
        "attention": (layout.attention != "inside", "use attention=inside"),
        "feed_forward": (layout.feed_forward != "branched", "use feed_forward=branched"),
        "rows_over": (
            layout.rows_over == "sequence" and not attends,
            "use rows_over=batch",
        ),
        "stationary": (layout.stationary != "auto", "use stationary=auto"),
        "schedule": (layout.schedule not in ("auto", "gather"), "use schedule=gather"),
        "keep_gathered": (layout.keep_gathered not in ("auto", "none"), "use keep_gathered=none"),
        "cluster": (layout.cluster, "nothing is decided by its times: leave it out"),
    }
    for key, (wrong, remedy) in refused.items():
        if wrong:
            value = getattr(layout, key)
            yield f"layout.{key}={value} is not for networks of others yet: {remedy}"


def _problems(module: nn.Module, roles: Roles, layout: LayoutConfig, pp: int = 1) -> Iterator[str]:
    """Yields a sentence for everything that keeps a network from running on a layout."""
    yield from roles.problems
    yield from described(roles)
    if roles.problems:
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    if layout.experts_over:
        yield from _of_different_experts(module, modules, roles, layout)
    between = spec_of(layout).boundary(layout).activation_layout
    roles = roles.for_samples() if between == "b" else roles
    key, n = columns_of(layout)
    columns = f"layout.{key}={n}"
    if between != "replicated" and not roles.lists:
        yield (
            "activations between sections are sharded on this layout, from the first layer to the "
            "last: the network needs a ModuleList of layers that have opening and closing products"
        )
    if between == "s" and len(roles.lists) > 1:
        yield (
            f"{' and '.join(roles.lists)}: tokens of two stacks cannot be sharded, since one reads "
            "the other's: use scheme=megatron without sequence_parallel, or optimus"
        )
    for name, role in roles.modules.items():
        yield from _of_module(name, modules[name], role, roles, layout, between)
        if role.kind == "opening":
            yield from _of_heads(name, modules, role, layout)
    yield from _of_entered(modules, roles, between)
    config = getattr(module, "config", None)
    by_torch = getattr(config, "_attn_implementation", "sdpa") == "sdpa"
    plain = by_torch and not (config is not None and vars(config).get("sliding_window"))
    if between == "s" and pp > 1 and not plain and not network_calls.attends_plainly(module):
        yield (
            f"{type(module).__name__} makes masks of attention for what a device has between "
            "sections: use scheme=megatron without sequence_parallel, or optimus"
        )
    for name in filter(roles.in_layers, modules):
        for read in inspect.signature(modules[name].forward).parameters:
            if between in next((on for end, on in _READ_WHOLE.items() if read.endswith(end)), ""):
                yield (
                    f"{name} reads {read}, which is whole, beside what devices have a part of "
                    "between sections: use scheme=megatron without sequence_parallel"
                )
    for name in roles.whole if between != "replicated" else ():
        above, _, leaf = name.rpartition(".")
        try:
            code = inspect.getsource(type(modules[above]))
        except (OSError, TypeError):
            continue  # it was typed at a prompt
        calls = {*re.findall(rf"\bself\.{leaf}\.(\w+)\(", code)} - {*modules[name]._modules}
        if calls:
            yield (
                f"{name}: activations are sharded between sections, and {above} calls "
                f"{', '.join(sorted(calls))} of it: use scheme=megatron without sequence_parallel"
            )
    yield from _of_shared(module, roles, layout)
    for name, role in roles.heads.items():
        for attribute in role.attributes:
            value = getattr(modules[name], attribute, None)
            if not isinstance(value, int) or value % n:
                yield (
                    f"{name}.{attribute}={value}: heads of {name} must be a number that "
                    f"{columns} divides"
                )
    for name, role in roles.parameters.items():
        size = module.get_parameter(name).shape
        if role.kind == "local" and (not size or size[0] % n):
            yield f"{name} {list(size)}: dimension 0 does not divide by {columns}"
        inside = roles.in_layers(name) and not roles.in_whole(name)
        if role.kind == "replicated" and between in ("s", "h") and inside:
            yield (
                f"{name}: replicated parameters inside layers need whole activations between "
                "sections: use scheme=megatron without sequence_parallel"
            )
    n_heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if isinstance(n_heads, int) and n_heads % n:
        yield f"config.num_attention_heads={n_heads} does not divide by {columns}"
    yield from _random_or_mixing(modules, layout)


def _of_heads(
    name: str, modules: Mapping[str, nn.Module], role: PlanRole, layout: LayoutConfig
) -> Iterator[str]:
    """Heads must be whole on a device, as far as an attention module says how wide they are."""
    product = modules[name]
    key, n = columns_of(layout)
    head = _head_width(modules[holder_of(name, modules)])
    weight: Any = product.weight
    for width in dict.fromkeys(role.widths(weight.shape[1 if is_conv1d(product) else 0])):
        if width % n == 0 and width >= head and width // n % head:  # else one column for each head
            yield (
                f"{name}: its {width // head} heads of width {head} do not divide by "
                f"layout.{key}={n}"
            )


def _of_entered(modules: Mapping[str, nn.Module], roles: Roles, between: str) -> Iterator[str]:
    """Modules that are entered as a whole must hold a section, and nothing that is around it.

    So it is where tokens are sharded, and where opening products read a latent.
    """
    norms = [name for name, role in roles.modules.items() if role.kind == "norm" and not role.split]
    kinds = roles.modules.items()
    opened = {holder_of(name, modules) for name, role in kinds if role.kind in ("opening", "head")}
    for name, role in kinds:
        if role.kind == "experts":
            if between != "replicated" and not roles.in_whole(name):
                yield (
                    f"{name}: activations are sharded between sections, and the layer itself "
                    "routes tokens to experts: use scheme=megatron without sequence_parallel"
                )
            continue
        opens = role.kind in ("opening", "head") and roles.in_layers(name)
        holder = holder_of(name, modules)
        between_sections = role.split and role.kind == "closing" and roles.in_layers(name)
        if between_sections and between != "replicated" and holder not in opened:
            yield (
                f"{name}: activations are sharded between sections, and it reads columns of what "
                "is between them: use scheme=megatron without sequence_parallel"
            )
        sharded = between in ("s", "b") and not roles.in_whole(name)
        if not opens or not (sharded or holder in roles.latent):
            continue
        if roles.is_layer(holder) or any(n.startswith(f"{holder}.") for n in norms):
            yield (
                f"{name}: activations are sharded between sections, and {holder} also computes "
                "what is between them: put the section into a module of its own, or use "
                "scheme=megatron without sequence_parallel, or optimus"
            )


def _of_shared(module: nn.Module, roles: Roles, layout: LayoutConfig) -> Iterator[str]:
    """Modules that share a parameter must have it in the same place."""
    users: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        role = roles.modules.get(path) or roles.parameters.get(name)
        if role is not None:
            kind = "a table" if role.kind in ("embedding", "head") else role.kind
            users.setdefault(parameter, []).append((name, kind))
        if not parameter.dim() and layout.dp_mode != "replicate":
            yield f"{name}: a scalar has no rows that replicas can shard: use dp_mode=replicate"
    for several in users.values():
        if len(kinds := {kind: name for name, kind in reversed(several)}) > 1:
            (other, second), *_, (one, first) = kinds.items()
            yield (
                f"{first} and {second} are one parameter, and their roles are {one} and {other}: "
                "give both the same, or embedding and head"
            )


def _random_or_mixing(modules: Mapping[str, nn.Module], layout: LayoutConfig) -> Iterator[str]:
    for name, module in modules.items():
        if isinstance(module, _BATCH_NORMS) and layout.n_processes > 1:
            yield f"{name}: {type(module).__name__} mixes samples, of which a process has a part"
        rates = {key: value for key, value in vars(module).items() if isinstance(value, float)}
        rates = {key: rate for key, rate in rates.items() if "dropout" in key or "jitter" in key}
        if any("Dropout" in kind.__name__ for kind in type(module).__mro__):
            rates["p"] = float(getattr(module, "p", 0.0))
        for key, rate in rates.items():
            if rate > 0:
                yield (
                    f"{name}.{key}={rate}: torch draws other random numbers on every process, also "
                    "where they must be equal: set it to 0 before the network is built"
                )


def _of_module(
    name: str, module: nn.Module, role: PlanRole, roles: Roles, layout: LayoutConfig, between: str
) -> Iterator[str]:
    """Yields what keeps a module from having its role."""
    (key, cols), rows = columns_of(layout), layout.rows
    hooked = parts.has_hooks(module)
    if role.kind == "norm":
        over_h = between == "h" and roles.in_layers(name)
        bare = not any(True for _ in module.parameters()) and not role.parts
        if (over_h or role.split) and (bare or parts.known_norm(module) is None):
            remedy = "cols=1" if role.split else "megatron_2d"
            yield (
                f"{name}: {type(module).__name__} is neither a LayerNorm nor an RMSNorm of one "
                f"width, whose statistics columns of devices can sum: use {remedy}"
            )
        return
    if role.kind == "experts":
        yield from _of_experts(name, module, roles, layout)
        return
    if role.kind == "embedding":
        if not is_table(module) or hooked:
            yield f"{name}: only what looks up as torch.nn.Embedding can be one; use replicated"
        elif module.embedding_dim % rows:  # type: ignore[operator]
            yield f"{name}: its width {module.embedding_dim} does not divide by layout.rows={rows}"
        return
    if (type(module) is not nn.Linear and not is_conv1d(module)) or hooked:
        yield (
            f"{name}: {role.kind} needs a plain torch.nn.Linear or transformers' Conv1D, and this "
            f"is a {type(module).__name__}{' with hooks' if hooked else ''}"
        )
        return
    weight: Any = module.weight
    n_out, n_in = weight.shape[::-1] if is_conv1d(module) else weight.shape
    if role.kind == "closing":
        sizes = [("inputs", n_in, key, cols), ("outputs", n_out, "rows", rows)]
        if between == "h" and roles.in_layers(name):
            sizes.append(("outputs", n_out, key, cols))
    else:
        sizes = [("inputs", n_in, "rows", rows)]
        widths = role.widths(n_out)
        if sum(widths) != n_out:
            yield f"{name}: parts {role.parts} do not add up to its {n_out} outputs"
        if role.kind == "opening":
            sizes += [("outputs", width, key, cols) for width in dict.fromkeys(widths)]
        if between == "h" and roles.in_layers(name):
            sizes.append(("inputs", n_in, key, cols))
    for what, size, axis, n in sizes:
        if size % n:
            yield f"{name}: {size} {what} do not divide by layout.{axis}={n}"


def _of_different_experts(
    network: nn.Module, modules: Mapping[str, nn.Module], roles: Roles, layout: LayoutConfig
) -> Iterator[str]:
    """Devices can have different experts where transformers lets others compute them."""
    said = f"layout.experts_over={format_value(layout.experts_over)}"
    experts = [name for name, role in roles.modules.items() if role.kind == "experts"]
    if not experts:
        yield f"{said}: the plan of {type(network).__name__} has no experts: leave it out"
    for name in experts:
        module: Any = modules[name]
        if not hasattr(network, "set_experts_implementation") or not hasattr(module, "has_bias"):
            why = "its own code chooses among all experts"
        elif module.has_post_expert_norm:
            why = "experts have a norm of their own"
        else:
            continue
        yield f"{said}: {name} ({type(module).__name__}): {why}: leave it out"


def _of_experts(name: str, module: nn.Module, roles: Roles, layout: LayoutConfig) -> Iterator[str]:
    """Columns of devices share every expert's matrices [out, in], and so do rows, unless they have
    different experts."""
    key, cols = columns_of(layout)
    cols = 1 if key in layout.experts_over else cols
    rows = 1 if "rows" in layout.experts_over else layout.rows
    for leaf, parameter in module.named_parameters(recurse=False):
        role = roles.parameters.get(f"{name}.{leaf}")
        if role is None or parameter.dim() == 2:  # a bias is as wide as its matrix
            continue
        n_out, n_in = parameter.shape[1:] if not role.turned else parameter.shape[:0:-1]
        between, outer = (role.widths(n_out), n_in) if role.kind == "opening" else ((n_in,), n_out)
        sizes = [(width, key, cols) for width in dict.fromkeys(between)]
        for size, axis, n in (*sizes, (outer, "rows", rows)):
            if size % n:
                shape = [*parameter.shape]
                yield f"{name}.{leaf} {shape}: {size} does not divide by layout.{axis}={n}"


def _head_width(module: nn.Module) -> int:
    """Returns the width of a head of an attention module that says it, otherwise 1."""
    names = ("head_dim", "head_size", "attention_head_size")
    widths = [getattr(module, name, None) for name in names]
    return next((width for width in widths if isinstance(width, int) and width), 1)


def columns_of(layout: LayoutConfig) -> tuple[str, int]:
    """Returns the key of a layout that counts the devices which share a section, and its value."""
    key = "branches" if "branches" in spec_of(layout).axes else "cols"
    return key, int(getattr(layout, key))
