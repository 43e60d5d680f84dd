"""Layers to test on, an oracle in plain autograd, and the comparison that names what differs.

A `Case` is one layer with everything that may be awkward about it. `oracle` computes it expert by expert in fp64; it
shares no code with `sonic`. `check` compares one tensor and says which, by how much and where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sonic import layer
from sonic.kernels import hopper
from sonic.kernels.common import INTERPRET, Tile
from sonic.kernels.metadata import Metadata, TileMap

#: Kernels run here: interpreted on the CPU, or compiled on a card.
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMMS = ("up_proj", "down_proj", "d_act", "d_input", "weight_grad_1", "weight_grad_2")

#: A kernel and its twin both sum in fp32 and round once, in another order: an ulp here and there, never a bias. A
#: truncation instead of a rounding (2^-9 in bf16) is several times larger.
KERNEL_LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1.5e-4}
#: A layer against fp64: rounding of the storage dtype along its chain of products (16 bits), and what the issue allows.
LAYER_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-10}

#: The families as they are, whatever a test puts in their place for a while.
TRITON, TWINS, HOPPER = (layer.FAMILIES[name] for name in ("triton", "torch", "hopper"))

TILES = {
    "own": None,
    "small": Tile(32, 64, 32, store="pointer", group=1),
    "split": Tile(64, 64, 64, split=2, flatten=True),
    "static": Tile(32, 64, 32, store="pointer", persistent=False),
}


def hopper_tiles(d: int, n: int) -> dict[str, list[Tile]]:
    """Every tile that the Hopper family ships, by step."""
    gemm, grad = hopper.grouped_gemm.configs, hopper.weight_grad.configs
    return {
        "up_proj": hopper.up_proj.configs(n),
        "down_proj": gemm(d),
        "d_input": gemm(d),
        "d_act": hopper.d_act.configs(n),
        "d_act_gemm": gemm(n),
        "weight_grad_1": grad(d),
        "weight_grad_2": grad(n),
    }


@dataclass(frozen=True)
class Case:
    """One layer: sizes, storage, how the inputs lie in memory, how tokens are routed and which kernels run.

    routing   random | empty (half of the experts get nothing) | one (every token to the same K experts, the first K)
    x         plain | columns (x[:, ::2]) | transposed (x.t()) | rows (x[:, :d] of a wider matrix)
    w         concat | interleaved (w1_layout) | view (w1 and w2 are slices of wider tensors)
    """

    T: int
    K: int
    E: int
    d: int
    n: int
    dtype: str = "fp32"
    routing: str = "random"
    x: str = "plain"
    w: str = "concat"
    gather: str = "fused"
    activation: str = "fused"
    aggregate: str = "gather_sum"
    tile: str = "own"
    ds: str = "from_da"
    cache: str = "h"

    @property
    def id(self) -> str:
        sizes = f"T{self.T}-K{self.K}-E{self.E}-d{self.d}-n{self.n}"
        fields = [f for f in dataclasses.fields(self) if f.name not in "TKEdn"]
        return "-".join([sizes, *(getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default)])

    def choices(self, family: str = "triton") -> layer.Choices:
        tile = TILES[self.tile]
        return layer.Choices(
            family,
            w1_layout="interleaved" if self.w == "interleaved" else "concat",
            gather=self.gather,
            activation=self.activation,
            aggregate=self.aggregate,
            ds=self.ds,
            cache=self.cache,
            tiles=dict.fromkeys(GEMMS, tile) if tile and family == "triton" else {},
        )


@dataclass
class Inputs:
    """Leaves that require grad, and views of them in the memory layout of the case: what the layer is given."""

    x: torch.Tensor
    router_w: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    do: torch.Tensor
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    def grads(self) -> dict[str, torch.Tensor]:
        return {f"d{name}": leaf.grad for name, leaf in self.leaves.items()}


def draw(case: Case, *, dtype: torch.dtype | None = None, device: torch.device = DEVICE, seed: int = 0) -> Inputs:
    """Seeded inputs of a case; `dtype` in place of the case's own."""
    dtype = dtype or DTYPES[case.dtype]
    T, K, E, d, n = case.T, case.K, case.E, case.d, case.n
    generator = torch.Generator().manual_seed(seed)

    def new(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(device, dtype)

    x, router_w = new(T, d), new(E, d, scale=d**-0.5)
    w1, w2 = new(E, 2 * n, d, scale=d**-0.5), new(E, d, n, scale=n**-0.5)
    if case.routing != "random":
        # a column that is 1 for every token gives each expert an offset of its own
        x[:, 0] = 1
        losers = slice(max(K, E // 2), E) if case.routing == "empty" else slice(K, E)
        router_w[losers, 0] -= 100
    leaves = {"x": x, "router_w": router_w, "w1": w1, "w2": w2}
    for leaf in leaves.values():
        leaf.requires_grad_()
    views = {"x": _laid_out(x, case.x), "w1": w1, "w2": w2}
    if case.w == "view":
        views |= {"w1": _slice(w1, 1, 16), "w2": _slice(w2, 2, 16)}
    return Inputs(views["x"], router_w, views["w1"], views["w2"], new(T, d), leaves)


def _slice(t: torch.Tensor, axis: int, more: int) -> torch.Tensor:
    """t as the front of a tensor that is longer along an axis; the rest is NaN, which must never reach a result."""
    size = list(t.shape)
    size[axis] = more
    return torch.cat([t, t.new_full(size, float("nan"))], dim=axis).narrow(axis, 0, t.shape[axis])


def _laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """x in another memory layout, NaN in between."""
    match how:
        case "plain":
            return x
        case "columns":
            return torch.stack([x, torch.full_like(x, float("nan"))], dim=2).flatten(1)[:, ::2]
        case "transposed":
            return x.t().contiguous().t()
        case "rows":
            return _slice(x, 1, 8)
    raise ValueError(how)


def concat_w1(w1: torch.Tensor, w: str) -> torch.Tensor:
    """W1 with its gate rows first."""
    return torch.cat([w1[:, ::2], w1[:, 1::2]], dim=1) if w == "interleaved" else w1


def oracle(
    case: Case, inputs: Inputs, ids: torch.Tensor, scores: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """O and all gradients in fp64 on the CPU, for expert ids (T, K) already chosen: o dx drouter_w dw1 dw2.

    With scores (T, K) given, their gradient ds takes the place of the router's.
    """
    wide = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in inputs.leaves.items()}
    ids = ids.long().cpu()
    if scores is None:
        s = F.linear(wide["x"], wide["router_w"]).gather(1, ids).softmax(dim=1)
    else:
        s = wide["s"] = scores.detach().cpu().double().requires_grad_()
        del wide["router_w"]
    gate_up = concat_w1(wide["w1"], case.w)
    o = 0 * wide["x"]  # a graph even without tokens
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        gate, up = (wide["x"][token] @ gate_up[e].T).chunk(2, dim=1)
        o = o.index_add(0, token, s[token, slot, None] * ((F.silu(gate) * up) @ wide["w2"][e].T))
    grads = torch.autograd.grad(
        o, list(wide.values()), inputs.do.cpu().double(), allow_unused=True, materialize_grads=True
    )
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(wide, grads, strict=True)}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in Frobenius norms, |got| where want is zero."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    size = torch.linalg.vector_norm(want).item()
    return torch.linalg.vector_norm(got - want).item() / (size or 1.0)


def check(case: object, name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """AssertionError naming case, tensor, error and the worst places, unless got is want within a relative error."""
    assert got is not None, f"{case}: {name} is missing"
    assert got.shape == want.shape, f"{case}: {name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative_error(got, want)
    if error <= limit:
        return
    apart = (got.detach().cpu().double() - want.detach().cpu().double()).abs()
    worst = torch.where(apart.isnan(), float("inf"), apart).flatten().topk(min(3, apart.numel())).indices.tolist()
    rows = [
        f"  {tuple(int(i) for i in torch.unravel_index(torch.tensor(at), apart.shape))}: "
        f"{got.flatten()[at].item()!r}, expected {want.flatten()[at].item()!r}"
        for at in worst
    ]
    unwritten = int(got.isnan().sum())
    raise AssertionError(
        "\n".join([f"{case}: {name} is off by {error:.2e}, limit {limit:.0e}; {unwritten} NaN", *rows])
    )


def check_equal(case: object, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """AssertionError unless both are the same, element by element (integers, or floats that must be bit-identical)."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{case}: {name}: {got.shape} {got.dtype}"
    differ = (got != want).flatten().nonzero().flatten()[:3].tolist()
    rows = [f"  {at}: {got.flatten()[at].item()}, expected {want.flatten()[at].item()}" for at in differ]
    assert not differ, "\n".join([f"{case}: {name} differs", *rows])


def tensors(result: object) -> dict[str, torch.Tensor]:
    """Every tensor that a step returns, by name or place."""
    if isinstance(result, Metadata):
        return {name: getattr(result, name) for name in ("offsets_E1", "slot_idx_R", "gather_idx_R", "row_idx_R")}
    if isinstance(result, TileMap):
        return {"table": result.table}
    found = {}
    for i, part in enumerate(result if isinstance(result, tuple) else (result,)):
        if isinstance(part, torch.Tensor):
            found[str(i)] = part
        elif part is not None:
            found |= {f"{i}.{name}": t for name, t in tensors(part).items()}
    return found


def against_twin(case: object, step: str, *args: object, limit: float | None = None, **kwargs: object) -> object:
    """Run a step of the triton family and its twin on the same inputs, compare all outputs, return the step's."""
    twin_args = list(args)
    if step.startswith("weight_grad"):
        twin_args[2] = args[2].new_full(args[2].shape, float("nan"))
    result = getattr(TRITON, step)(*args, **kwargs)
    compare(case, step, result, getattr(TWINS, step)(*twin_args, **kwargs), limit)
    return result


def compare(case: object, step: str, result: object, wanted: object, limit: float | None = None) -> None:
    """AssertionError unless everything that a step returned is what another family's did, up to the dtype's limit."""
    if step in ("d_act", "d_swiglu"):  # tiles decide how many partial sums of dS there are
        got, want = ({**tensors(r), "2": r[2].sum(0)} for r in (result, wanted))
    else:
        got, want = tensors(result), tensors(wanted)
    assert got.keys() == want.keys(), f"{case}: {step} returned {list(got)}, its twin {list(want)}"
    for name, t in want.items():
        assert got[name].dtype == t.dtype, f"{case}: {step}.{name} is {got[name].dtype}, its twin's {t.dtype}"
        if t.dtype.is_floating_point:
            at = limit or max(KERNEL_LIMIT[t.dtype], KERNEL_LIMIT[torch.float32])
            check(case, f"{step}.{name}", got[name], t, at)
        else:
            check_equal(case, f"{step}.{name}", got[name], t)


@contextmanager
def steps_replaced(make) -> Iterator[None]:
    """Every step of the triton family replaced by make(name, step) for a while."""
    names = [f.name for f in dataclasses.fields(TRITON)]
    layer.FAMILIES["triton"] = layer.Steps(**{name: make(name, getattr(TRITON, name)) for name in names})
    try:
        yield
    finally:
        layer.FAMILIES["triton"] = TRITON


@contextmanager
def counted() -> Iterator[Mapping[str, int]]:
    """How often each step of the triton family runs."""
    calls: dict[str, int] = {}

    def make(name: str, step):
        def wrapped(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return step(*args, **kwargs)

        return wrapped

    with steps_replaced(make):
        yield calls
