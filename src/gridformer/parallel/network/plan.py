"""Plans: the role of every module of a network, by patterns of names.

A plan maps patterns to roles. A pattern is a name in `named_modules()`, or of a parameter, in which
`*` stands for anything: `layers.*.self_attn.q_proj`. The roles:

    opening          a product whose results are sharded by columns: Megatron's column-parallel
    opening: 3 parts     three products of equal widths side by side, such as q, k and v; or their
    opening: 64, 16, 16  widths: a device gets its columns of each
    head             an opening product whose results are gathered, such as the head of logits
    closing          a product that reads such columns, and whose partial sums are added up
    closing split    a closing product that is given whole activations, and reads its columns
    experts          a module of which devices along layout.experts_over have different experts, and
                     others parts of each; its matrices [experts, out, in] open and close
    opening transposed, closing transposed: such a matrix [experts, in, out]
    embedding        a table of which every column of devices has some rows
    norm             over the width of the residual; LayerNorm and RMSNorm are found without a plan
    norm sharded     over all columns of an opening product, of which a device has some
    replicated       every device holds and computes all of it
    summed           replicated, and read together with sharded heads, such as a norm of heads
    local            parameters whose dimension 0 counts heads or columns: a device has some
    heads: a, b      attributes a, b of a module count heads or columns, and are divided by the
                     number of columns of devices

`default_plan` reads the plan that a transformers model carries for tensor parallelism, and that for
expert parallelism where only this one has the experts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gridformer.config import closest

Role = TypeVar("Role")
KINDS = (
    *("opening", "head", "closing", "closing split", "experts", "embedding", "norm"),
    *("norm sharded", "replicated", "summed", "local"),
)
_OF_TRANSFORMERS = {
    "colwise": "opening",
    "packed_colwise": "opening: 2 parts",
    "packed_rowwise": "opening transposed: 2 parts",
    "colwise_gather_output": "head",
    "rowwise": "closing",
    "rowwise_split_input": "closing split",
    "embedding_rowwise": "embedding",
    "embedding_colwise": "embedding",
    "replicated_with_grad_allreduce": "summed",
    "replicate": "replicated",
    "local_params": "local",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "summed",
}
# Latent attention, of which plans name some products or none; it is found by `kv_b_proj`.
_LATENT = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), "opening"),
    "o_proj": "closing",
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_layernorm"), "summed"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "indexer"), "summed"),
}


@dataclass(frozen=True)
class PlanRole:
    """A role, as its text in a plan says.

    Attributes:
        parts: The widths of parts of an opening product, or their number alone if they are equal;
            the width of a norm without a weight.
        split: Whether a closing product is given whole activations, or a norm sharded ones.
        turned: Whether matrices of experts are [experts, in, out].
        attributes: The names after `heads:`.
    """

    kind: str
    parts: tuple[int, ...] = ()
    split: bool = False
    attributes: tuple[str, ...] = ()
    turned: bool = False

    @staticmethod
    def of(text: str) -> PlanRole:
        """Parses a role.

        Raises:
            ValueError: There is no such role.
        """
        kind, _, rest = (word.strip() for word in str(text).partition(":"))
        if kind in ("opening transposed", "closing transposed"):
            return replace(PlanRole.of(str(text).replace(" transposed", "")), turned=True)
        if kind == "heads" and (names := re.findall(r"\w+", rest)):
            return PlanRole("heads", attributes=tuple(names))
        if kind == "opening" and (several := re.fullmatch(r"(\d+) parts", rest)):
            return PlanRole(kind, (int(several[1]),))
        if kind == "opening" and re.fullmatch(r"\d+(\s*,\s*\d+)+", rest):
            return PlanRole(kind, tuple(int(width) for width in rest.split(",")))
        if not rest and kind in ("closing split", "norm sharded"):
            return PlanRole(kind.split()[0], split=True)
        if not rest and kind == "opening gathered":
            return PlanRole("head")
        if not rest and kind in KINDS:
            return PlanRole(kind)
        raise ValueError(f"there is no role '{text}'{closest(kind, KINDS)}")

    def widths(self, whole: int) -> tuple[int, ...]:
        """Returns the widths of the parts of a product that is `whole` columns wide."""
        if len(self.parts) == 1:
            return (whole // self.parts[0],) * self.parts[0]
        return self.parts or (whole,)


@dataclass
class Roles:
    """The roles of a network's modules and parameters, by name, and what is wrong with the plan.

    Attributes:
        modules: For names of modules: opening, head, closing, embedding and norm.
        parameters: For names of parameters: replicated, summed and local.
        heads: For names of modules, the attributes that count heads.
        not_placed: Names of parameters without a role.
        lists: Names of the lists of layers.
        whole: Names of modules in layers of which every device computes the whole between sections,
            since they have replicated parameters or experts.
        latent: Names of the modules that hold summed products, which opening products read.
        problems: Sentences.
    """

    modules: dict[str, PlanRole] = field(default_factory=dict)
    parameters: dict[str, PlanRole] = field(default_factory=dict)
    heads: dict[str, PlanRole] = field(default_factory=dict)
    not_placed: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    latent: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def in_layers(self, name: str) -> bool:
        """Whether a module or parameter is part of a layer in a list of them."""
        return any(name.startswith(f"{one}." if one else "") for one in self.lists)

    def layer_of(self, name: str) -> str:
        """Returns the name of the layer that a module is part of."""
        prefixes = (f"{above}." if above else "" for above in self.lists)
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        return prefix + name.removeprefix(prefix).partition(".")[0]

    def is_layer(self, name: str) -> bool:
        """Whether a module is one of a list of layers."""
        above, _, last = name.rpartition(".")
        return above in self.lists and last.isdecimal()

    def held_by(self, stage: nn.Module) -> Roles:
        """Returns the roles of what a stage of the network holds."""
        here = dict(stage.named_modules(remove_duplicate=False))
        modules = {n: role for n, role in self.modules.items() if n in here}
        of_here = {n: role for n, role in self.parameters.items() if n.rpartition(".")[0] in here}
        heads = {n: role for n, role in self.heads.items() if n in here}
        whole = [n for n in self.whole if n in here]
        return replace(self, modules=modules, parameters=of_here, heads=heads, whole=whole)

    def for_samples(self) -> Roles:
        """Returns the roles where devices have samples between sections, and sections few of them.

        What has no products there is computed for a device's own samples.
        """
        products = [name for name, role in self.modules.items() if role.kind != "norm"]
        holds = (any(n.startswith(f"{one}.") for n in products) for one in self.whole)
        return replace(self, whole=[one for one, some in zip(self.whole, holds) if some])

    def in_whole(self, name: str) -> bool:
        """Whether a module or parameter is part of one that every device computes whole."""
        return any(name.startswith(f"{one}.") for one in self.whole)


def default_plan(network: nn.Module) -> dict[str, str] | None:
    """Returns the plan that a transformers model carries, None if a network has none.

    Kinds of its plan that have no role here keep their name, so that they are refused by it.
    """
    carried, modules = getattr(network, "tp_plan", None) or {}, dict(network.named_modules())
    plan = _of_dispatched(modules, getattr(network, "ep_plan", None) or {}, carried)
    if not isinstance(carried, Mapping) or not any("*" in one for one in (*carried, *plan)):
        return None
    for pattern, kind in carried.items():
        matches = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        role = _OF_TRANSFORMERS.get(kind, f"transformers' {kind}")
        if role == "embedding" and not all(map(is_table, matches)):
            role = "replicated"
        dims = {p.dim() for name, p in network.named_parameters() if fnmatchcase(name, pattern)}
        if dims and not matches and kind == "colwise" and dims != {3}:
            role = "local"
        if dims == {3} and kind == "colwise":  # whatever the plan of Inkling says
            is_first = pattern.endswith("gate_up_proj")
            role = "opening: 2 parts" if is_first else "closing transposed"
        if matches or dims:
            plan[pattern] = role
    for more in (_of_tied, _of_norms, _of_latent):
        plan |= more(modules, plan)
    return plan


def _of_dispatched(
    modules: Mapping[str, nn.Module], dispatched: Mapping[str, str], carried: Mapping[str, str]
) -> dict[str, str]:
    """Returns the roles of experts that a plan for expert parallelism alone has."""
    found: dict[str, str] = {}
    for pattern, kind in dispatched.items() if isinstance(dispatched, Mapping) else ():
        experts: Any = next((m for name, m in modules.items() if fnmatchcase(name, pattern)), None)
        known = kind != "ep_dispatch_experts" or pattern in carried
        if known or experts is None or experts.has_post_expert_norm:
            continue
        turned, parts = " transposed" * experts.is_transposed, ": 2 parts" * experts.has_gate
        first = f"{pattern}.gate_up_proj" if experts.has_gate else f"{pattern}.up_proj"
        found |= {pattern: "experts", first: f"opening{turned}{parts}"}
        found[f"{pattern}.down_proj"] = f"closing{turned}"
        if experts.has_bias:
            found |= {f"{first}_bias": f"opening{parts}", f"{pattern}.down_proj_bias": "closing"}
    return found


def _of_latent(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the roles of products of latent attention, of which plans name some or none."""
    found: dict[str, str] = {}
    for name in modules:
        above, _, last = name.rpartition(".")
        for child, role in _LATENT.items() if last == "kv_b_proj" else ():
            latent = f"{above}.{child}"
            if latent in modules and _given(f"{latent}.weight", plan) is None:
                found[re.sub(r"(?<=\.)\d+(?=\.)", "*", latent)] = role
    return found


def _of_tied(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the roles of embeddings that share their table with a head, or that of the head."""
    found: dict[str, str] = {}
    for head in [pattern for pattern, role in plan.items() if role == "head"]:
        weight = getattr(modules.get(head), "weight", None)
        for name, module in modules.items():
            if isinstance(module, nn.Embedding) and module.weight is weight:
                found |= {name: "embedding"} if is_table(module) else {head: "replicated"}
    return found


def _of_norms(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the roles of norms named for a product: q_norm reads what q_proj returns."""
    found: dict[str, str] = {}
    for name, norm in modules.items():
        path, _, leaf = name.rpartition(".")
        product = f"{path}.{leaf.partition('_')[0]}_proj"
        weight: Any = getattr(norm, "weight", None)
        is_norm = "Norm" in type(norm).__name__ and weight is not None
        if not is_norm or product not in modules or _given(f"{name}.weight", plan) is not None:
            continue
        reads, n_out = _given(product, plan), getattr(modules[product], "out_features", 0)
        role = "replicated" if reads == "head" else ""
        if reads == "opening" and n_out == weight.numel():
            role = "norm sharded" if weight.dim() == 1 else "local"
        elif reads == "opening" and n_out % weight.numel() == 0:
            role = "summed"
        if role:
            found[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)] = role
    return found


def roles_of(network: nn.Module, plan: Mapping[str, str] | None) -> Roles:
    """Returns the roles that a plan, or else the default plan, gives to all parts of a network.

    Norms of the width of the residual need no role. With the default plan, what is outside sections
    needs none, and is replicated: every device computes all of it.
    """
    roles = Roles()
    patterns = default_plan(network) if plan is None else plan
    if patterns is None:
        roles.problems.append(
            f"{type(network).__name__} carries no plan for tensor parallelism: give one, such as "
            '{"layers.*.attn.q": "opening", "layers.*.attn.out": "closing", ...}'
        )
        return roles
    parsed: dict[str, PlanRole] = {}
    for pattern, text in patterns.items():
        try:
            parsed[pattern] = PlanRole.of(text)
        except ValueError as error:
            roles.problems.append(f"{pattern}: {error}")
    if roles.problems:
        return roles
    modules = dict(network.named_modules(remove_duplicate=False))
    names = [*modules, *(name for name, _ in network.named_parameters(remove_duplicate=False))]
    for pattern, role in parsed.items():
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            roles.problems.append(
                f"'{pattern}' in the plan matches nothing{closest(pattern, names)}"
            )
        if role.kind == "heads":  # a pattern of layers matches all that is in them, too
            counting = [
                name
                for name in matches
                if all(hasattr(modules.get(name), attribute) for attribute in role.attributes)
            ]
            roles.heads |= dict.fromkeys(counting, role)
            if matches and not counting:
                what = " and ".join(role.attributes)
                roles.problems.append(f"'{pattern}': no module that it matches has {what}")
            continue
        for name in matches:
            if role.kind in ("opening", "head", "closing", "experts", "embedding", "norm"):
                if name in modules:
                    roles.modules[name] = role
                elif not _is_of_experts(name, network, parsed):
                    roles.problems.append(f"{name} is a parameter, and {role.kind} is for modules")
    kinds = ("opening", "head", "closing", "experts")
    products = {name for name, role in roles.modules.items() if role.kind in kinds}
    roles.lists = _lists_of_layers(modules, products, roles)
    widths = _residual_widths(modules, roles, parsed)
    ends = [
        name
        for name in products
        if roles.modules[name].kind in ("opening", "closing") and not roles.modules[name].split
    ]
    sections = tuple(f"{holder_of(name, modules)}." for name in ends if roles.in_layers(name))
    for name, parameter in network.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        experts = path in roles.modules and roles.modules[path].kind == "experts"
        if path in roles.modules and not experts:
            continue
        given = _given(name, parsed)
        allowed = ("opening", "closing") if experts else ("replicated", "summed", "local")
        if given is not None and given.kind in allowed:
            roles.parameters[name] = given
            if given.kind == "summed" and parameter.dim() > 1:
                roles.latent.append(holder_of(path, modules))
        elif "Norm" in type(modules[path]).__name__ and tuple(parameter.shape) in widths:
            roles.modules[path] = PlanRole("norm")
        elif plan is None and not experts and not name.startswith(sections):
            roles.parameters[name] = PlanRole("replicated")
        elif plan is None and type(modules[path]).__module__ == "transformers.activations":
            roles.parameters[name] = PlanRole("summed")  # between opening and closing
        else:
            roles.not_placed.append(name)
    roles.whole = _whole(modules, roles)
    width = next(iter(widths)) if len(widths) == 1 else ()
    inside = tuple(f"{holder_of(name, modules)}." for name in products if roles.in_layers(name))
    for name, module in modules.items():
        bare = "Norm" in type(module).__name__ and not any(True for _ in module.parameters())
        between = roles.in_layers(name) and not roles.in_whole(name)
        if bare and between and not name.startswith(inside):
            roles.modules.setdefault(name, PlanRole("norm", width))
    return roles


def _whole(modules: Mapping[str, nn.Module], roles: Roles) -> list[str]:
    """Returns the outermost modules in layers that have replicated parameters or experts."""
    experts = [name for name, role in roles.modules.items() if role.kind == "experts"]
    alike = [name for name, role in roles.parameters.items() if role.kind == "replicated"]
    found: dict[str, None] = {}
    for name in filter(roles.in_layers, (*experts, *alike)):
        layer = roles.layer_of(name)
        child = f"{layer}.{name.removeprefix(f'{layer}.').partition('.')[0]}"
        if child in modules and child != name and any(True for _ in modules[child].children()):
            found[child] = None
    return [*found]


def _is_of_experts(name: str, network: nn.Module, parsed: Mapping[str, PlanRole]) -> bool:
    """Whether a parameter is a matrix of each of several experts, or a bias."""
    given = _given(name.rpartition(".")[0], parsed)
    return network.get_parameter(name).dim() > 1 and given is not None and given.kind == "experts"


def _given(name: str, parsed: Mapping[str, Role]) -> Role | None:
    """Returns the role of a parameter, or of the innermost module around it that has one."""
    around = name
    while around:
        for pattern, role in parsed.items():
            kind = getattr(role, "kind", role)
            inherits = kind != "local" or around in (name, name.rpartition(".")[0])
            if kind != "heads" and inherits and fnmatchcase(around, pattern):
                return role
        around = around.rpartition(".")[0]
    return None


def _lists_of_layers(
    modules: Mapping[str, nn.Module], products: set[str], roles: Roles
) -> list[str]:
    """Returns the outermost lists of modules, some of which have sections."""

    def has_section(path: str) -> bool:
        inside = {roles.modules[name].kind for name in products if name.startswith(f"{path}.")}
        return "experts" in inside or {"closing"} < inside

    lists: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        paths = [f"{name}.{i}" if name else i for i, _ in module.named_children()]
        inside = any(name.startswith(f"{one}." if one else "") for one in lists)
        if not inside and any(map(has_section, paths)):
            lists.append(name)
    return lists


def _residual_widths(
    modules: Mapping[str, nn.Module], roles: Roles, parsed: Mapping[str, PlanRole]
) -> set[tuple[int, ...]]:
    """Returns the shapes of vectors as wide as the results of closing products."""
    widths: set[tuple[int, ...]] = set()
    for name, role in roles.modules.items():
        weight = getattr(modules.get(name), "weight", None)
        if role.kind == "closing" and weight is not None and weight.dim() == 2:
            widths.add((weight.shape[1 if is_conv1d(modules[name]) else 0],))
        matrices = modules[name].named_parameters(recurse=False)
        for leaf, matrix in matrices if role.kind == "experts" else ():
            given = _given(f"{name}.{leaf}", parsed)
            if given is not None and given.kind == "closing" and matrix.dim() == 3:
                widths.add((matrix.shape[2 if given.turned else 1],))
    return widths


def is_table(module: nn.Module) -> bool:
    """Whether a module looks up tokens in a table as torch does, and then may scale the result.

    Its own code is run on what is found, beside a table that shows in its result if it is read.
    """
    if not isinstance(module, nn.Embedding) or [*module.children()]:
        return False
    if module.max_norm or module.scale_grad_by_freq or module.sparse:
        return False
    if type(module) is nn.Embedding:
        return True
    probe: Any = copy.copy(module)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    probe._parameters = {"weight": nn.Parameter(torch.full((1, module.embedding_dim), torch.nan))}
    probe._buffers = {
        name: torch.zeros_like(buffer, device="cpu") for name, buffer in module.named_buffers()
    }
    probe.__class__ = type("Probe", (type(module), _Found), {})
    try:
        found = probe(tokens)
        return found.shape == (1, 2, module.embedding_dim) and bool(found.isfinite().all())
    except Exception:  # whatever code of others raises
        return False


class _Found(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ones(*tokens.shape, self.embedding_dim, dtype=self.weight.dtype)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer with a weight [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def described(roles: Roles) -> Iterator[str]:
    """Yields a sentence for parameters without a role, those of like modules together."""
    alike: dict[str, list[str]] = {}
    for name in roles.not_placed:
        pattern = name.rpartition(".")[0] or name
        for one in roles.lists:
            pattern = re.sub(rf"^{re.escape(one)}\.\d+", f"{one}.*", pattern)
        alike.setdefault(pattern, []).append(name)
    for pattern, names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{names[0]}{more}: nothing places it. Give '{pattern}' a role in the plan: opening or "
            "closing if it is a product of a section, embedding or head if it is a table of words, "
            "summed if sharded heads read it, replicated if every device is to compute all of it"
        )


def holder_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Returns the name of the module with code that calls a product: no mere list of modules."""
    path = name.rpartition(".")[0]
    while path and isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path
