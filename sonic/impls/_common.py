"""What adapters share: members that the harness asks for, leaf tensors, gradients under canonical names."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sonic.problem import DTYPES, Problem
from sonic.record import Point
from sonic.routers import plain_router
from sonic.shapes import Shape

#: Major compute capability of Hopper.
HOPPER = 9
#: A worker meets many shapes, each a recompilation of one function; past its limit torch would run eagerly.
RECOMPILES = 1 << 16


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` through torch.compile, whole and with static shapes; one per process, so a shape compiles once."""
    allow_recompiles()
    return torch.compile(function, fullgraph=True, dynamic=False)


def allow_recompiles() -> None:
    """Lets torch.compile meet as many shapes as a worker does, also in functions that a package compiles itself."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = RECOMPILES


@dataclass(frozen=True)
class Properties:
    """What an implementation does between its GEMMs: a row of the paper's feature matrix (v1 Table 2).

    True, False, or None where the feature does not apply. `gather_fused_forward`, `gather_fused_backward`: rows of X
    and dO are gathered while they are loaded, never stored in expert order. `activation_fused`, `d_activation_fused`:
    SwiGLU and its gradient in an epilogue. `ds_from_da`: dS = <dA', A>, so that Y is not needed again. `d_act_whole`:
    dH and dS in one epilogue. `io_overlapped`: the epilogue's loads and stores run under another tile's MMA.
    `no_scatter_kernel`: no kernel that only moves rows back into token order. `efficient_topk`: a top-K kernel of its
    own. `no_padding`: no rows of padding in memory outside a GEMM's tiles.

    `kept` names the matrices kept for the backward beside X: gathered `Xe` (R, d), `H` (R, 2n), `A` (R, n), `Y` (R, d).
    `padding` is the multiple that an expert's rows are rounded up to in memory.
    """

    gather_fused_forward: bool | None
    gather_fused_backward: bool | None
    activation_fused: bool | None
    d_activation_fused: bool | None
    ds_from_da: bool | None
    d_act_whole: bool | None
    io_overlapped: bool | None
    no_scatter_kernel: bool | None
    efficient_topk: bool | None
    no_padding: bool | None
    kept: tuple[Literal["Xe", "H", "A", "Y"], ...]
    padding: int = 1

    def held_bytes(self, shape: Shape, itemsize: int, R: int | None = None) -> int:
        """Bytes of X and the kept matrices for R rows (default T K: no padding), the formula of the paper's Fig 13;
        indices and scores come on top."""
        rows = shape.R if R is None else R
        columns = {"Xe": shape.d, "H": 2 * shape.n, "A": shape.n, "Y": shape.d}
        return itemsize * (shape.T * shape.d + rows * sum(columns[name] for name in self.kept))


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that wants a gradient and shares the memory of `tensor`."""
    return tensor.detach().requires_grad_()


class Adapter:
    """Base of the adapters: one implementation on one problem.

    KNOBS holds the dotted names that it takes (`knobs.gather`, `tile.m`); all others are dropped before a point is
    hashed. OPS holds what it can run, of `sonic.record.Op`. `note` says what a reader of the row must know (a cut-down
    tuner, a weight conversion that a training step would repeat). `problem` has the routing that is computed, which the
    gate checks. Members that a row takes where they exist: family, kernels_cost, bytes_model(), flops_padded, tune_s,
    tuned; for one kernel alone also flops_model and check(). `properties` says what is fused and what is kept, None
    where nothing is declared, with the reason in `undeclared`.
    """

    KNOBS: frozenset[str] = frozenset()
    OPS: frozenset[str] = frozenset({"layer", "experts"})
    properties: Properties | None = None
    undeclared: str = "nothing is declared"

    @staticmethod
    def available() -> str | None:
        """None, or why the implementation cannot run in this environment; cheap, imports nothing heavy."""
        return None

    @staticmethod
    def version() -> str:
        """Version that enters the key of a row."""
        return f"torch-{torch.__version__}"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        """None, or why this one point is out of reach (status `unsupported`)."""
        return dtype_refusal(point, DTYPES)

    def __init__(self, problem: Problem, point: Point) -> None:
        self.note: str | None = None
        self.problem = problem
        self.layer = point.op == "layer"
        self.K = problem.shape.K
        self.x_Td = leaf(problem.x_Td)
        self.w1_E2nd, self.w2_Edn = leaf(problem.w1_E2nd), leaf(problem.w2_Edn)
        self.router_w_Ed, self.scores_TK, self.ids_TK = (
            leaf(problem.router_w_Ed),
            leaf(problem.scores_TK),
            problem.ids_TK,
        )

    def forward(self) -> torch.Tensor:
        """O (T, d), with a graph behind it unless the caller switched gradients off."""
        raise NotImplementedError

    def weights(self) -> Sequence[torch.Tensor]:
        """Parameters in the layout that the implementation reads; memory kept for the backward does not count them."""
        return (self.w1_E2nd, self.w2_Edn, self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients after the backward, canonical names and layouts: dx_Td dw1_E2nd dw2_Edn, drouter_Ed or ds_TK."""
        routing = ("drouter_Ed", self.router_w_Ed) if self.layer else ("ds_TK", self.scores_TK)
        named = (("dx_Td", self.x_Td), ("dw1_E2nd", self.w1_E2nd), ("dw2_Edn", self.w2_Edn), routing)
        return {name: tensor.grad for name, tensor in named}

    def zero_grad(self) -> None:
        """Drops all gradients, so that the next backward writes instead of adding."""
        for tensor in (self.x_Td, self.w1_E2nd, self.w2_Edn, self.router_w_Ed, self.scores_TK):
            tensor.grad = None


def dtype_refusal(point: Point, allowed: Sequence[str] | dict[str, torch.dtype]) -> str | None:
    """Why the point's dtype cannot run, naming it and the allowed ones; None when it can."""
    if point.dtype in allowed:
        return None
    return f"dtype is {point.dtype!r}; allowed: {', '.join(allowed)}"


def version_of(package: str, module: str | None = None) -> str:
    """Version of a package from git: its number, and a hash of its sources, since one number spans many commits."""
    root = Path(importlib.util.find_spec(module or package).origin).parent
    sources = source_hash(sorted(root.rglob("*.py")))
    try:
        return f"{importlib.metadata.version(package)}+{sources}"
    except importlib.metadata.PackageNotFoundError:
        return sources


def source_hash(files: Sequence[Path | str]) -> str:
    """8 hex digits of what some files hold, in their order."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:8]


def missing(modules: Mapping[str, str], name: str, how: str) -> str | None:
    """Why `name` cannot run when one of `modules` (module -> package) is not installed, and how to install them."""
    for module, package in modules.items():
        if importlib.util.find_spec(module) is None:
            return f"{name}: package {package!r} is not installed ({how})"
    return None


def cuda_refusal(point: Point, device: torch.device, allowed: Sequence[str] = ("bf16",)) -> str | None:
    """What every package of CUDA or Triton kernels asks for: a GPU, a token and a dtype; None when all is there."""
    if device.type != "cuda":
        return f"device is {device.type!r}; its kernels need cuda"
    if point.shape.T == 0:
        return "shape.T is 0; its kernels need at least 1 token"
    return dtype_refusal(point, allowed)


def element_refusal(limit: int, **products: int) -> str | None:
    """Why a package that counts elements in 32 bits cannot run, naming the product, its value and the limit."""
    for name, value in products.items():
        if value > limit:
            return f"{name.replace('_', '*')} is {value}; its kernels count elements in 32 bits, up to {limit}"
    return None


def hopper_refusal(point: Point, device: torch.device, multiple: int) -> str | None:
    """Why kernels made for Hopper's TMA cannot run: they need compute capability 9.0 and d and n in multiples."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < HOPPER:
        return f"compute capability is {major}.{minor}; its kernels need {HOPPER}.0 or newer"
    for name in ("d", "n"):
        if getattr(point.shape, name) % multiple:
            return f"shape.{name} is {getattr(point.shape, name)}; its kernels need multiples of {multiple}"
    return None


def own_configs(tuner: Any) -> list[Any]:
    """The list that an autotuned function came with, whatever `set_configs` gave it since."""
    return vars(tuner).setdefault("every_config", list(tuner.configs))


def set_configs(tuner: Any, configs: list[Any]) -> None:
    """Gives an autotuned function this list; choices that were made from another one are forgotten."""
    own_configs(tuner)
    if tuner.configs != configs:
        tuner.configs = configs
        tuner.cache.clear()


def restrict_triton(tuner: Any, picks: Sequence[Mapping[str, int]] | None) -> None:
    """Gives an autotuned Triton function the configurations of its own list that match `picks`, or all for None.

    A pick holds tile sizes, `num_warps` and `num_stages`, as many as are needed to tell configurations apart.
    """
    every = own_configs(tuner)
    configs = every if picks is None else [config for config in every if any(_matches(config, p) for p in picks)]
    if not configs:
        raise RuntimeError(f"{tuner.base_fn.__name__} has none of the configurations {list(picks)}")
    set_configs(tuner, configs)


def _matches(config: Any, pick: Mapping[str, int]) -> bool:
    given = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return all(given.get(name) == value for name, value in pick.items())


class KernelPackage(Adapter):
    """Base of packages without a router: `layer` runs the harness's plain one, then `experts`."""

    def forward(self) -> torch.Tensor:
        if not self.layer:
            return self.experts(self.scores_TK, self.ids_TK)
        return self.experts(*plain_router(self.x_Td, self.router_w_Ed, self.K))

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """O (T, d) from scores and ids (T, K), ids int32 as given or int64 as `torch.topk` makes them."""
        raise NotImplementedError
