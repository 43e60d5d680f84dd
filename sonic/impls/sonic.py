"""Our layer: all kernel families, every knob, and every kernel alone (`op=<kernel>`).

`sonic.moe` for op=layer, `sonic.experts` for op=experts; under another router `sonic.routing.route` and
`sonic.experts_plan`. Given pairs of varying number per token are sorted by expert within op=experts, as ids are.
op=routing is what comes before the experts: logits to rows sorted by expert. Kernels that gather take `knobs.gather`:
`separate` times the gather and the GEMM on its rows, `given` the GEMM alone; `knobs.activation=separate` leaves
up_proj and d_act their GEMM alone. op=combine is the down-projection and the sum over each token's rows, in the way of
`knobs.aggregate`. Limits are the layer's own: E to 4096, K
to 64, fp64 in the torch family only. `tile.*` changes the sizes that it names in the kernel's own choice, in every
GEMM kernel or in `tile.kernel` alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import sonic
from sonic import layer, reference, routers, routing
from sonic.impls._common import Adapter, Properties, dtype_refusal, leaf
from sonic.kernels import (
    aggregate,
    d_act,
    d_input,
    down_proj,
    grouped_gemm,
    hopper,
    metadata,
    plan,
    router_topk,
    tuning,
    up_proj,
    weight_grad,
)
from sonic.kernels.common import SMEM_LIMIT, Cost, HopperTile, Tile, TileTooLarge
from sonic.problem import DTYPES, Problem
from sonic.record import KERNEL_OPS, LAYER_OPS, KernelTime, Point

#: Name of the Triton function that a step launches.
_FUNCTIONS = {
    "router_topk": "_topk_kernel",
    "metadata": "_scatter_kernel",
    "up_proj": "_up_proj_kernel",
    "down_proj": "_grouped_gemm_kernel",
    "aggregate": "_aggregate_kernel",
    "d_act": "_d_act_kernel",
    "weight_grad_2": "_weight_grad_kernel",
    "d_input": "_grouped_gemm_kernel",
    "weight_grad_1": "_weight_grad_kernel",
    "routing": "_scatter_kernel",
    "gather_rows": "_gather_rows_kernel",
}
_COSTS: dict[str, Callable[..., Cost]] = {
    "router_topk": router_topk.router_topk_cost,
    "metadata": metadata.metadata_cost,
    "up_proj": up_proj.up_proj_cost,
    "down_proj": down_proj.down_proj_cost,
    "aggregate": aggregate.aggregate_cost,
    "d_act": d_act.d_act_cost,
    "weight_grad_2": weight_grad.weight_grad_2_cost,
    "d_input": d_input.d_input_cost,
    "weight_grad_1": weight_grad.weight_grad_1_cost,
    "routing": router_topk.router_topk_cost,
    "gather_rows": aggregate.gather_rows_cost,
}
#: Steps of one pass, in the order in which the layer launches them.
_FORWARD = ("router_topk", "metadata", "up_proj", "down_proj", "aggregate")
_BACKWARD = ("d_act", "weight_grad_2", "d_input", "aggregate", "weight_grad_1")
#: GEMM kernels, and what multiplies R n d in each one's FLOPs.
_GEMMS = {"up_proj": 4, "down_proj": 2, "d_act": 2, "d_input": 4, "weight_grad_1": 4, "weight_grad_2": 2}

#: The ablation knobs at rest; the byte model describes these.
_PLAIN = {"gather": "fused", "activation": "fused", "aggregate": "gather_sum", "ds": "from_da", "cache": "h"}
#: Ablation knobs that one kernel alone takes, by op.
_KERNEL_KNOBS = {
    "up_proj": ("gather", "activation"),
    "d_act": ("gather", "activation"),
    "weight_grad_1": ("gather",),
    "weight_grad_2": ("gather",),
    "combine": ("aggregate",),
}
#: Schedules that a family's kernels have.
_SCHEDULES = {"triton": ("persistent", "static_map"), "hopper": ("persistent", "cooperative", "pingpong")}

#: Two routers that add a token's scores in another order may rank the pairs at the border of an expert differently:
#: this share of all pairs is exchanged at most.
_CLOSE_SHARE = 1e-3


@dataclass(frozen=True)
class _Tiling:
    """Which tile each GEMM step of a point takes in a family."""

    point: Point
    family: str

    @property
    def into(self) -> grouped_gemm.Into:
        return layer.Choices(self.family, aggregate=self.point.knobs.aggregate).into

    def hopper(self, step: str) -> bool:
        """Whether a step runs warp-specialised: results that go elsewhere than to rows are the portable family's."""
        return self.family == "hopper" and (step not in ("down_proj", "d_input") or self.into == "rows")

    def kernel(self, step: str) -> str:
        """The kernel that is a step's GEMM."""
        return "d_act_gemm" if step == "d_act" and self.point.knobs.activation == "separate" else step

    def tuned_as(self, step: str) -> str:
        """Name under which a step's tile is chosen."""
        if self.hopper(step):
            return f"hopper.{self.kernel(step)}"
        return grouped_gemm.tuned_as(step, self.into) if step in ("down_proj", "d_input") else self.kernel(step)

    def known(self, step: str) -> Tile | None:
        shape = self.point.shape
        return tuning.known(self.tuned_as(step), shape.d, shape.n, shape.E, DTYPES[self.point.dtype])

    def candidates(self, step: str) -> list[Tile]:
        d, n, dtype = self.point.shape.d, self.point.shape.n, DTYPES[self.point.dtype]
        kernel = self.kernel(step)
        if self.hopper(step):
            return {
                "up_proj": lambda: hopper.up_proj.configs(n),
                "down_proj": lambda: hopper.grouped_gemm.configs(d),
                "d_input": lambda: hopper.grouped_gemm.configs(d),
                "d_act": lambda: hopper.d_act.configs(n),
                "d_act_gemm": lambda: hopper.grouped_gemm.configs(n),
                "weight_grad_1": lambda: hopper.weight_grad.configs(d),
                "weight_grad_2": lambda: hopper.weight_grad.configs(n),
            }[kernel]()
        return {
            "up_proj": lambda: up_proj.configs(dtype, n),
            "down_proj": lambda: grouped_gemm.configs(dtype, d, self.into),
            "d_input": lambda: grouped_gemm.configs(dtype, d, self.into),
            "d_act": lambda: d_act.configs(dtype, n),
            "d_act_gemm": lambda: d_act.configs(dtype, n),
            "weight_grad_1": lambda: weight_grad.configs(dtype, d),
            "weight_grad_2": lambda: weight_grad.configs(dtype, n),
        }[kernel]()

    def asked(self) -> dict[str, Tile]:
        """A tile for each kernel that the point aims at, by step; none without a request.

        Raises ValueError for a tile that the family cannot run, TileTooLarge for one that does not fit.
        """
        spec, schedule = self.point.tile, self.point.knobs.schedule
        sized = any(v is not None for v in spec.model_dump(exclude={"kernel"}).values())
        if schedule in (None, "persistent") and not sized:
            return {}
        tiles = {}
        for step in [spec.kernel] if spec.kernel else _GEMMS:
            if self.point.op not in _GEMMS or step == self.point.op:
                tiles[step] = self._sized(step)
        return tiles

    def _sized(self, step: str) -> Tile:
        """The kernel's own tile with what the point asks for; what depends on that follows."""
        spec, schedule = self.point.tile, self.point.knobs.schedule
        tile = self.known(step) or self.candidates(step)[0]
        if isinstance(tile, HopperTile):
            # the weight gradients have one schedule, which a request for the others leaves alone
            if schedule not in (None, "persistent", tile.schedule) and not step.startswith("weight_grad"):
                fit = [t for t in self.candidates(step) if t.schedule == schedule]
                if not fit:
                    raise ValueError(f"knobs.schedule is {schedule!r}; {step} has no such tile at these sizes")
                tile = fit[0]
            if spec.warps is not None:
                raise ValueError(f"tile.warps is {spec.warps}; the hopper family fixes its warps")
            tile = tile.override(m=spec.m, n=spec.n, k=spec.k, stages=spec.stages)
            hopper.CHECKS[self.kernel(step)](tile)
            return tile
        tile = tile.override(m=spec.m, n=spec.n, k=spec.k, stages=spec.stages, warps=spec.warps)
        tile = replace(tile, persistent=schedule != "static_map")
        ring = tile.stages * (tile.m + tile.n) * tile.k * DTYPES[self.point.dtype].itemsize
        # programs share an SM while their rings fit, and while accumulators take half of the registers at most
        ctas = tile.ctas if tile.ctas * ring <= SMEM_LIMIT and tile.ctas * tile.m * tile.n <= 32768 else 1
        return replace(tile, ctas=ctas, split=min(tile.split, tile.n // 16))


@cache
def _source_hash() -> str:
    """Hash of every source that can change what is measured: kernels with their tuned tiles, layer and this adapter."""
    here = Path(sonic.__file__).parent
    files = [
        here / "layer.py",
        here / "routing.py",
        here / "routers.py",
        Path(__file__),
        *(here / "kernels").rglob("*.py"),
        *(here / "kernels").rglob("*.json"),
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _choices(point: Point, family: str) -> layer.Choices:
    """The kernels that a point's knobs ask for. ValueError for knobs that exclude each other."""
    knobs = {name: getattr(point.knobs, name) for name in _PLAIN}
    if point.op in KERNEL_OPS:
        knobs["gather"] = _PLAIN["gather"]  # a kernel alone knows a third way, which is no layer's
    return layer.Choices(family, **knobs)


class Impl(Adapter):
    """`sonic` on one problem; see the module."""

    #: Of the hopper family with all knobs at rest.
    properties = Properties(
        gather_fused_forward=True,
        gather_fused_backward=True,
        activation_fused=True,
        d_activation_fused=True,
        ds_from_da=True,
        d_act_whole=True,
        io_overlapped=True,
        no_scatter_kernel=True,
        efficient_topk=True,
        no_padding=True,
        kept=("H",),
    )
    KNOBS = frozenset(
        {f"knobs.{name}" for name in ("family", "schedule", *_PLAIN)}
        | {f"tile.{name}" for name in ("m", "n", "k", "stages", "warps", "kernel")}
    )
    OPS = frozenset({"layer", "experts", *KERNEL_OPS})
    RAGGED = True
    ROUTERS = frozenset(routers.METHODS)

    @staticmethod
    def version() -> str:
        return f"{sonic.__version__}+{_source_hash()}"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if (refusal := dtype_refusal(point, DTYPES)) is not None:
            return refusal
        if point.op in KERNEL_OPS:
            taken = _KERNEL_KNOBS.get(point.op, ())
            for name, value in _PLAIN.items():
                if name not in taken and getattr(point.knobs, name) != value:
                    return f"knobs.{name} is {getattr(point.knobs, name)!r}; op={point.op} runs with {value!r}"
        for name in ("aggregate", "ds", "cache"):
            if point.routing.method in routers.RAGGED and getattr(point.knobs, name) != _PLAIN[name]:
                return (
                    f"knobs.{name} is {getattr(point.knobs, name)!r}; with routing.method={point.routing.method} "
                    f"tokens have different numbers of experts, which runs with {_PLAIN[name]!r} alone"
                )
        kernel = point.tile.kernel
        if kernel is not None and kernel not in _GEMMS:
            return f"tile.kernel is {kernel!r}; allowed: {', '.join(_GEMMS)}"
        try:
            family = layer.resolve_family(point.knobs.family, device, DTYPES[point.dtype], point.shape.d, point.shape.n)
            if point.op in LAYER_OPS:
                _choices(point, family)
            Tile().override(**point.tile.model_dump(exclude={"kernel"}))
            schedule, allowed = point.knobs.schedule, _SCHEDULES.get(family, ())
            if schedule is not None and schedule not in allowed:
                return f"knobs.schedule is {schedule!r}; the {family} family has: {', '.join(allowed) or 'none'}"
            if family == "hopper":
                _Tiling(point, family).asked()
        except TileTooLarge:
            return None  # said when it is measured, as out_of_resources
        except ValueError as error:
            return str(error)
        return None

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        self._tuned_before = tuning.tune_seconds
        self.point, self.shape = point, problem.shape
        self.family = layer.resolve_family(
            point.knobs.family, problem.device, problem.dtype, problem.shape.d, problem.shape.n
        )
        self.choices = _choices(point, self.family)
        self.tiling = _Tiling(point, self.family)
        if self.family != "torch":
            self.choices = replace(self.choices, tiles=self.tiling.asked())
        self.ragged = point.routing.method in routers.RAGGED
        if self.ragged and point.op == "experts":
            self.pairs = problem.pairs()
            self.scores_R = leaf(self.pairs.scores_R)
        if point.op == "layer" and not problem.plain:
            self._adopt()
        if self.family == "torch" and self.ragged:
            self.note = "waits for the device, which alone knows the number of pairs"
        if point.op in KERNEL_OPS:
            self._prepare(point.op)

    def forward(self) -> torch.Tensor:
        if self.point.op in KERNEL_OPS:
            return self._call()
        if self.layer and not self.problem.plain:
            chosen = self._route(torch.nn.functional.linear(self.x_Td, self.router_w_Ed), self.family)
            return layer.experts_plan(self.x_Td, chosen, self.w1_E2nd, self.w2_Edn, choices=self.choices)
        if self.ragged:
            make = plan.plan_of_pairs_torch if self.family == "torch" else plan.plan_of_pairs
            p = self.pairs
            given = make(p.token_R, p.ids_R, self.scores_R, p.token_offsets_T1, self.shape.E)
            return layer.experts_plan(self.x_Td, given, self.w1_E2nd, self.w2_Edn, choices=self.choices)
        if self.layer:
            return layer.moe(self.x_Td, self.router_w_Ed, self.w1_E2nd, self.w2_Edn, self.K, choices=self.choices)
        return layer.experts(self.x_Td, self.ids_TK, self.scores_TK, self.w1_E2nd, self.w2_Edn, choices=self.choices)

    def _route(self, logits_TE: torch.Tensor, family: str) -> routing.TopK | plan.Plan:
        """The point's router on logits (T, E)."""
        problem, given = self.problem, self.problem.routing
        return routing.route(
            logits_TE, self.K, given.method, score=given.score, draws_E=problem.draws_E, family=family,
            **problem.options,
        )  # fmt: skip

    def _adopt(self) -> None:
        """Take the pairs that our own router keeps for the routing that the gate computes.

        It must be the problem's, which plain torch made of the same logits, up to close calls. ValueError otherwise.
        """
        with torch.no_grad():
            chosen = self._route(self.problem.logits_TE, self.family)
        kept, want = _mask(chosen, self.shape.T, self.shape.E), self.problem.kept()
        apart = int((kept != want).sum())
        if apart > reference.LIMIT * self._close_calls:
            raise ValueError(
                f"the router keeps other pairs than its plain definition: {apart} of {self.problem.R} differ"
            )
        if apart:
            self.problem = self.problem.with_kept(kept)
            self.note = f"{apart} of {self.problem.R} pairs are close calls that plain torch decides otherwise"

    @property
    def _close_calls(self) -> int:
        """Pairs that may differ between two right routers."""
        return max(1, round(_CLOSE_SHARE * self.problem.R))

    def grads(self) -> dict[str, torch.Tensor]:
        found = super().grads()
        if self.ragged and not self.layer and self.scores_R.grad is not None:
            there = self.ids_TK >= 0
            ds_TK = self.scores_R.grad.new_zeros(there.shape)
            found["ds_TK"] = ds_TK.masked_scatter(there, self.scores_R.grad)
        return found

    def zero_grad(self) -> None:
        super().zero_grad()
        if self.ragged and not self.layer:
            self.scores_R.grad = None

    def weights(self) -> Sequence[torch.Tensor]:
        given = (*self.pairs, self.scores_R) if self.ragged and not self.layer else ()
        return (*super().weights(), *given)

    # One kernel alone

    def _prepare(self, op: str) -> None:
        """The kernel's inputs, drawn in its dtype, as a call and its plain-torch twin."""
        p, d, n = self.problem, self.shape.d, self.shape.n
        steps, tile = self.choices.steps, self.choices.tile(op)
        twin = layer.FAMILIES["torch"]
        draw = torch.Generator(p.device).manual_seed(p.seed + 1)

        def rows(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=p.dtype, device=p.device).normal_(generator=draw)

        if op == "routing":
            logits = p.logits_TE
            self._outputs = lambda: _tensors(self._rows_of(logits, self.family, steps), op)
            self._twin = lambda: _tensors(self._rows_of(logits, "torch", twin), op)
            return
        knobs, into = self.point.knobs, self.choices.into
        fused, bare = knobs.gather == "fused", knobs.activation == "separate"
        meta = steps.metadata(p.ids_TK, self.shape.E)
        given = {}
        if knobs.gather == "given":
            given = {id(t): t.index_select(0, meta.gather_idx_R) for t in (p.x_Td, p.do_Td)}

        def read(s: layer.Steps, t: torch.Tensor) -> torch.Tensor:
            """What a GEMM reads of x or dO: tokens that it gathers, or rows."""
            return t if fused else given[id(t)] if given else s.gather_rows(t, meta.gather_idx_R)

        w1 = self.choices.w1_view(p.w1_E2nd)
        scores_R = p.scores_TK.flatten()[meta.slot_idx_R.long()]
        match op:
            case "router_topk":
                logits = torch.nn.functional.linear(p.x_Td, p.router_w_Ed)
                call = lambda s: s.router_topk(logits, self.K)  # noqa: E731
            case "metadata":
                call = lambda s: s.metadata(p.ids_TK, self.shape.E)  # noqa: E731
            case "up_proj":
                call = lambda s, **t: s.up_proj(  # noqa: E731
                    read(s, p.x_Td), w1, meta, gather=fused, with_act=not bare, **t
                )
            case "down_proj":
                a = rows(p.R, n)
                call = lambda s, **t: s.down_proj(a, p.w2_Edn, meta, **t)  # noqa: E731
            case "aggregate":
                y = rows(p.R, d)
                call = lambda s: s.aggregate(y, meta.row_idx_R, p.scores_TK, self.shape.T, self.K)  # noqa: E731
            case "combine":
                a = rows(p.R, n)

                def call(s: layer.Steps, **t: Tile) -> torch.Tensor:
                    y = s.down_proj(a, p.w2_Edn, meta, into=into, scores=p.scores_TK, **t)
                    if into == "tokens":
                        return y.to(p.dtype)
                    return s.aggregate(y, meta.row_idx_R if into == "rows" else None, p.scores_TK, meta.T, self.K)

                tile = self.choices.tile("down_proj")
            case "d_act" if bare:
                call = lambda s, **t: s.d_act_gemm(  # noqa: E731
                    read(s, p.do_Td), p.w2_Edn, meta, gather=fused, **t
                )
            case "d_act":
                h = rows(p.R, 2 * n)
                call = lambda s, **t: s.d_act(  # noqa: E731
                    read(s, p.do_Td), p.w2_Edn, h, scores_R, meta, gather=fused, **t
                )
            case "d_input":
                dh = rows(p.R, 2 * n)
                call = lambda s, **t: s.d_input(dh, w1, meta, **t)  # noqa: E731
            case "weight_grad_1":
                dh = rows(p.R, 2 * n)
                call = lambda s, **t: s.weight_grad_1(  # noqa: E731
                    read(s, p.x_Td), dh, torch.empty_like(w1), meta, gather=fused, **t
                )
            case "weight_grad_2":
                ap = rows(p.R, n)
                call = lambda s, **t: s.weight_grad_2(  # noqa: E731
                    read(s, p.do_Td), ap, torch.empty_like(p.w2_Edn), meta, gather=fused, **t
                )
        self._outputs = lambda: _tensors(call(steps, **tile), self.point.op)
        self._twin = lambda: _tensors(call(twin), self.point.op)

    def _rows_of(self, logits_TE: torch.Tensor, family: str, steps: layer.Steps) -> metadata.Metadata:
        """Logits to rows sorted by expert."""
        if self.problem.plain:
            return steps.metadata(steps.router_topk(logits_TE, self.K)[1], self.shape.E)
        chosen = self._route(logits_TE, family)
        return chosen.meta if self.ragged else steps.metadata(chosen.ids_TK, self.shape.E)

    def _call(self) -> torch.Tensor:
        return self._outputs()[0]

    def check(self) -> dict[str, float]:
        """Relative error of each output of the kernel against its twin, as a multiple of what the dtype allows.

        A router of varying rows is held to its definition up to close calls, and its rows to the pairs that it keeps.
        """
        if self.point.op == "routing" and self.ragged:
            chosen = self._route(self.problem.logits_TE, self.family)
            kept = _mask(chosen, self.shape.T, self.shape.E)
            twin = plan.plan_of_mask_torch(
                kept.to(torch.int8), torch.zeros(kept.shape, device=kept.device), chosen.limit
            )
            pairs = zip(_tensors(chosen.meta, "routing"), _tensors(twin.meta, "routing"), strict=True)
            apart = int((kept != self.problem.kept()).sum())
            errors = {f"kernel.{i}": 0.0 if torch.equal(g, w) else math.inf for i, (g, w) in enumerate(pairs)}
            return errors | {"kernel.pairs": apart / self._close_calls}
        floor = reference.FLOOR[self.problem.dtype]
        got, want = self._outputs(), self._twin()
        return {f"kernel.{i}": _error(g, w, floor) for i, (g, w) in enumerate(zip(got, want, strict=True))}

    # What a row says beside times

    def _steps(self) -> tuple[str, ...]:
        op = self.point.op
        if op == "combine":
            return ("down_proj", "aggregate")
        if op in KERNEL_OPS:
            return ("gather_rows", op) if self.point.knobs.gather == "separate" else (op,)
        forward = _FORWARD if self.layer else _FORWARD[1:]
        return forward + (_BACKWARD if self.point.mode == "fwd_bwd" else ())

    def _cost(self, step: str) -> Cost:
        options, knobs = {}, self.point.knobs
        alone = self.point.op in KERNEL_OPS
        bare = alone and knobs.activation == "separate"
        if step == "up_proj":
            options = {"with_h": self.point.mode != "fwd_infer", "with_act": not bare}
        elif step == "d_act":
            options = {"fused": not bare}
        cost = _COSTS[step](self.shape, self.problem.R, self.problem.dtype.itemsize, **options)
        in_rows = alone and knobs.gather != "fused" and step != "gather_rows"
        return replace(cost, gathered={}) if in_rows else cost

    def _tile(self, step: str) -> Tile | None:
        if step not in _GEMMS or self.family == "torch":
            return None
        return self.choices.tiles.get(step) or self.tiling.known(step)

    @property
    def kernels_cost(self) -> list[KernelTime]:
        """Model FLOPs, bytes and the tile of every step, in launch order."""
        if self.family == "torch":
            return []
        found = []
        for step in self._steps():
            cost, tile = self._cost(step), self._tile(step)
            sizes = tile.sizes() if tile else None
            moved, once = (cost.bytes, cost.bytes_once) if self._plain else (None, None)
            name = _FUNCTIONS[step]
            if step == "d_act" and self.tiling.kernel(step) == "d_act_gemm" and self.family == "hopper":
                name = _FUNCTIONS["d_input"]  # its grouped GEMM
            found.append(KernelTime(name=name, us=0.0, flops=cost.flops, bytes=moved, bytes_once=once, tile=sizes))
        return found

    @property
    def _plain(self) -> bool:
        """Whether the ablation knobs are at rest, or one kernel's own, so that the byte model fits."""
        own = () if self.point.knobs.aggregate == "atomic" else _KERNEL_KNOBS.get(self.point.op, ())
        return all(getattr(self.point.knobs, name) == value for name, value in _PLAIN.items() if name not in own)

    def bytes_model(self) -> int | None:
        """Ideal traffic of all steps, gathered rows counted once per use; None for an ablation, which moves more, and
        for other routers than plain top-K, which is not modelled."""
        if not self._plain or not self.problem.plain:
            return None
        return sum(self._cost(step).bytes for step in self._steps())

    @property
    def flops_model(self) -> int:
        """Model FLOPs of one kernel alone."""
        return sum(self._cost(step).flops for step in self._steps())

    @property
    def flops_padded(self) -> int | None:
        """FLOPs that the tiles really multiply: rows of every expert rounded up to the tile of each GEMM."""
        if self.family == "torch":
            return None
        counts = self.problem.counts_E
        total = 0
        for step in self._steps():
            tile = self._tile(step)
            if tile is not None:
                block = tile.k if step.startswith("weight_grad") else tile.m
                rows = int(((counts + block - 1) // block * block).sum())
                total += _GEMMS[step] * rows * self.shape.n * self.shape.d
        return total or None

    @property
    def tune_s(self) -> float | None:
        return (tuning.tune_seconds - self._tuned_before) or None

    @property
    def tuned(self) -> bool | None:
        """Whether every GEMM ran a choice measured on this card (committed or the user's own)."""
        gemms = [step for step in self._steps() if step in _GEMMS]
        if self.family == "torch" or not gemms:
            return None
        shape = self.shape
        if self.choices.tiles:
            return False
        names = [self.tiling.tuned_as(step) for step in gemms]
        return all(tuning.measured(name, shape.d, shape.n, shape.E, self.problem.dtype) for name in names)


def _mask(chosen: routing.TopK | plan.Plan, T: int, E: int) -> torch.Tensor:
    """Pairs as a mask (T, E) bool."""
    if isinstance(chosen, routing.TopK):
        mask = torch.zeros(T, E, dtype=torch.bool, device=chosen.ids_TK.device)
        return mask.scatter(1, chosen.ids_TK.long(), True)
    chosen = chosen.exact()
    mask = torch.zeros(T, E, dtype=torch.bool, device=chosen.ids_R.device)
    mask[torch.repeat_interleave(chosen.token_offsets_T1.diff().long()), chosen.ids_R.long()] = True
    return mask


def _error(got: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    """Relative error over the floor; indices are right or wrong."""
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, want) else math.inf
    return reference.relative_error(got, want) / floor


def _tensors(result: object, op: str) -> list[torch.Tensor]:
    """A kernel's outputs as a list; partial sums of dS, whose number depends on the tile, are added up."""
    if isinstance(result, metadata.Metadata):
        return [result.offsets_E1, result.slot_idx_R, result.gather_idx_R, result.row_idx_R]
    outputs = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
    if op == "d_act" and len(outputs) > 1:
        outputs[2] = outputs[2].sum(0)
    return outputs
