"""Compile launches for sm_90a on a machine without a GPU and count what came out.

`python -m tests.kernels.compile_sm90 [group] [--dtype bf16] [--d 1536] [--n 256] [--filter REGEX] [--distinct]` prints
one JSON line per launch. A process of its own, since TRITON_INTERPRET must be off when triton is imported. Groups:

    tiles      every tile that a GEMM kernel may choose at these sizes; --distinct leaves out those that differ only in
               the order in which programs visit tiles
    variants   the first tile of every GEMM kernel under every switch that changes its code
    hopper     as `tiles`, of the Hopper family
    hopper_variants   as `variants`, of the Hopper family
    others     every kernel without a tile: router, metadata, aggregation, element-wise
    tuned      the choices in `sonic/kernels/tuned` that were made under this triton, each at its own sizes and dtype
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from sonic.kernels import (
    aggregate,
    common,
    d_act,
    d_input,
    down_proj,
    grouped_gemm,
    hopper,
    metadata,
    plan,
    router_topk,
    token_rounding,
    tuning,
    up_proj,
    weight_grad,
)
from sonic.kernels.common import Tile, tile_of
from tests.oracle import hopper_tiles

_BIN = Path(triton.backends.nvidia.__file__).parent / "bin"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int8: "i8"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: What to compile: a name, the tile (None for a kernel that has none), and the launcher.
Wanted = Iterator[tuple[str, Tile | None, Callable[[], object]]]


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher asked for."""

    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, int]


def captured(call: Callable[[], object]) -> list[Launch]:
    """Run a launcher on CPU tensors and keep its launches instead of running them."""
    launches: list[Launch] = []

    def keep(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: int) -> SimpleNamespace:
        del grid, warmup
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)), kwargs))
        made = {"metadata": SimpleNamespace(tensordesc_meta=None), "run": SimpleNamespace(launch=None)}
        return SimpleNamespace(**made, function=None, packed_metadata=None)

    common.forget()
    with mock.patch.object(JITFunction, "run", keep), mock.patch.object(torch.cuda, "current_device", lambda: 0):
        call()
    common.forget()
    return launches


def compiled(launch: Launch):
    """Compile a launch as the just-in-time compiler would specialise it."""
    signature, constants, attributes = {}, {}, {}
    gluon = isinstance(launch.kernel, GluonJITFunction)
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            block = ", ".join(map(str, value.block_shape))
            layout = f",{value.layout!r}" if gluon else ""
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}[{block}]{layout}>"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if gluon else ASTSource)(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)


def counted(kernel) -> dict[str, int]:
    """Registers, shared memory and spilled bytes of a compiled kernel, and instructions by the name that SASS gives
    them. They are counted in PTX, since the disassembler takes half as long as the compiler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([_BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)}
    count = lambda pattern: len(re.findall(pattern, kernel.asm["ptx"]))  # noqa: E731
    return {
        "registers": usage["REG"],
        "shared": kernel.metadata.shared,
        "spills": usage["STACK"] + usage["LOCAL"],
        "hgmma": count(r"wgmma\.mma_async"),
        "tma_loads": count(r"cp\.async\.bulk\.tensor\S*\.shared::\w+\.global"),
        "tma_stores": count(r"cp\.async\.bulk\.tensor\S*\.global\.shared::"),
        "cp_async": count(r"cp\.async\.c[ag]\."),
        "shared_stores": count(r"st\.shared|stmatrix"),
    }


class Sizes:
    """Inputs of every launcher at given sizes; zeros, since nothing runs."""

    def __init__(self, dtype: torch.dtype, d: int, n: int) -> None:
        self.T, self.E, self.K, self.d, self.n, self.dtype = 64, 4, 2, d, n, dtype
        R = self.T * self.K
        self.ids = torch.arange(R, dtype=torch.int32).view(self.T, self.K) % self.E
        self.meta = metadata.metadata_torch(self.ids, self.E)
        new = lambda *size: torch.zeros(size, dtype=dtype)  # noqa: E731
        self.x, self.rows, self.h, self.a = new(self.T, d), new(R, d), new(R, 2 * n), new(R, n)
        self.w1, self.w2 = new(self.E, 2, n, d), new(self.E, d, n)
        self.w1_interleaved = new(self.E, n, 2, d).transpose(1, 2)
        self.scores_R, self.scores_TK = torch.zeros(R), torch.zeros(self.T, self.K)

    def gemm(self, kernel: str, tile: Tile) -> Callable[[], object]:
        """The launcher of a GEMM kernel as the layer calls it by default."""
        meta = self.meta
        return {
            "up_proj": lambda: up_proj.up_proj(self.x, self.w1, meta, tile=tile),
            "down_proj": lambda: down_proj.down_proj(self.a, self.w2, meta, tile=tile),
            "d_input": lambda: d_input.d_input(self.h, self.w1, meta, tile=tile),
            "d_act": lambda: d_act.d_act(self.x, self.w2, self.h, self.scores_R, meta, tile=tile),
            "d_act_gemm": lambda: d_act.d_act_gemm(self.x, self.w2, meta, tile=tile),
            "weight_grad_1": lambda: weight_grad.weight_grad_1(self.x, self.h, self.w1, meta, tile=tile),
            "weight_grad_2": lambda: weight_grad.weight_grad_2(self.x, self.a, self.w2, meta, tile=tile),
        }[kernel]

    def hopper(self, kernel: str, tile: Tile) -> Callable[[], object]:
        """As `gemm`, of the Hopper family."""
        meta, gemm = self.meta, hopper.grouped_gemm
        return {
            "up_proj": lambda: hopper.up_proj.up_proj(self.x, self.w1, meta, tile=tile),
            "down_proj": lambda: gemm.down_proj(self.a, self.w2, meta, tile=tile),
            "d_input": lambda: gemm.d_input(self.h, self.w1, meta, tile=tile),
            "d_act": lambda: hopper.d_act.d_act(self.x, self.w2, self.h, self.scores_R, meta, tile=tile),
            "d_act_gemm": lambda: gemm.d_act_gemm(self.x, self.w2, meta, tile=tile),
            "weight_grad_1": lambda: hopper.weight_grad.weight_grad_1(self.x, self.h, self.w1, meta, tile=tile),
            "weight_grad_2": lambda: hopper.weight_grad.weight_grad_2(self.x, self.a, self.w2, meta, tile=tile),
        }[kernel]

    def candidates(self) -> dict[str, list[Tile]]:
        d, n, dtype = self.d, self.n, self.dtype
        return {
            "up_proj": up_proj.configs(dtype, n),
            "down_proj": grouped_gemm.configs(dtype, d),
            "d_input": grouped_gemm.configs(dtype, d),
            "d_act": d_act.configs(dtype, n),
            "weight_grad_1": weight_grad.configs(dtype, d),
            "weight_grad_2": weight_grad.configs(dtype, n),
        }


def _distinct(candidates: list[Tile]) -> list[Tile]:
    """Without the tiles that differ only in the order in which programs visit tiles."""
    return list({replace(tile, group=0): tile for tile in reversed(candidates)}.values())[::-1]


def tiles(dtype: torch.dtype, d: int, n: int, distinct: bool = False) -> Wanted:
    sizes = Sizes(dtype, d, n)
    for kernel, candidates in sizes.candidates().items():
        for tile in _distinct(candidates) if distinct else candidates:
            yield kernel, tile, sizes.gemm(kernel, tile)


def variants(dtype: torch.dtype, d: int, n: int) -> Wanted:
    s = Sizes(dtype, d, n)
    meta, first = s.meta, {kernel: candidates[0] for kernel, candidates in s.candidates().items()}
    up, act = partial(up_proj.up_proj, s.x), partial(d_act.d_act, w2_Edn=s.w2, h_R2n=s.h, scores_R=s.scores_R)
    calls = {
        "up_proj without H": lambda t: up(s.w1, meta, with_h=False, tile=t),
        "up_proj without A": lambda t: up(s.w1, meta, with_act=False, tile=t),
        "up_proj interleaved": lambda t: up(s.w1_interleaved, meta, tile=t),
        "up_proj rows": lambda t: up_proj.up_proj(s.rows, s.w1, meta, gather=False, tile=t),
        "down_proj slots": lambda t: down_proj.down_proj(s.a, s.w2, meta, into="slots", tile=t),
        "down_proj tokens": lambda t: down_proj.down_proj(s.a, s.w2, meta, into="tokens", scores=s.scores_TK, tile=t),
        "d_input slots": lambda t: d_input.d_input(s.h, s.w1, meta, into="slots", tile=t),
        "d_input tokens": lambda t: d_input.d_input(s.h, s.w1, meta, into="tokens", tile=t),
        "d_input interleaved": lambda t: d_input.d_input(s.h, s.w1_interleaved, meta, tile=t),
        "d_act rows": lambda t: act(s.rows, meta=meta, gather=False, tile=t),
        "d_act without A'": lambda t: act(s.rows, meta=meta, gather=False, with_ap=False, tile=t),
        "d_act gemm": lambda t: d_act.d_act_gemm(s.x, s.w2, meta, tile=t),
        "weight_grad_1 rows": lambda t: weight_grad.weight_grad_1(s.rows, s.h, s.w1, meta, gather=False, tile=t),
        "weight_grad_1 interleaved": lambda t: weight_grad.weight_grad_1(s.x, s.h, s.w1_interleaved, meta, tile=t),
        "weight_grad_2 rows": lambda t: weight_grad.weight_grad_2(s.rows, s.a, s.w2, meta, gather=False, tile=t),
    }
    for name, call in calls.items():
        # atomic addition has tiles of its own, and all of them are compiled here
        own = grouped_gemm.configs(dtype, d, "tokens") if name.endswith("tokens") else [first[name.split()[0]]]
        for tile in own:
            yield name, tile, partial(call, tile)


def hopper_family(dtype: torch.dtype, d: int, n: int, distinct: bool = False) -> Wanted:
    sizes = Sizes(dtype, d, n)
    for kernel, candidates in hopper_tiles(d, n).items():
        for tile in _distinct(candidates) if distinct else candidates:
            yield f"hopper.{kernel}", tile, sizes.hopper(kernel, tile)


def hopper_variants(dtype: torch.dtype, d: int, n: int) -> Wanted:
    s = Sizes(dtype, d, n)
    meta, first = s.meta, {kernel: candidates[0] for kernel, candidates in hopper_tiles(d, n).items()}
    gemm, grad_1, grad_2 = hopper.grouped_gemm, hopper.weight_grad.weight_grad_1, hopper.weight_grad.weight_grad_2
    up = partial(hopper.up_proj.up_proj, meta=meta)
    act = partial(hopper.d_act.d_act, w2_Edn=s.w2, h_R2n=s.h, scores_R=s.scores_R, meta=meta)
    calls = {
        "up_proj without H": lambda t: up(s.x, s.w1, with_h=False, tile=t),
        "up_proj without A": lambda t: up(s.x, s.w1, with_act=False, tile=t),
        "up_proj interleaved": lambda t: up(s.x, s.w1_interleaved, tile=t),
        "up_proj rows": lambda t: up(s.rows, s.w1, gather=False, tile=t),
        "d_input interleaved": lambda t: gemm.d_input(s.h, s.w1_interleaved, meta, tile=t),
        "d_act rows": lambda t: act(s.rows, gather=False, tile=t),
        "d_act_gemm": lambda t: gemm.d_act_gemm(s.x, s.w2, meta, tile=t),
        "d_act_gemm rows": lambda t: gemm.d_act_gemm(s.rows, s.w2, meta, gather=False, tile=t),
        "weight_grad_1 rows": lambda t: grad_1(s.rows, s.h, s.w1, meta, gather=False, tile=t),
        "weight_grad_1 interleaved": lambda t: grad_1(s.x, s.h, s.w1_interleaved, meta, tile=t),
        "weight_grad_2 rows": lambda t: grad_2(s.rows, s.a, s.w2, meta, gather=False, tile=t),
    }
    for name, call in calls.items():
        tile = first[name.split()[0]]
        yield f"hopper.{name}", tile, partial(call, tile)


def others(dtype: torch.dtype, d: int, n: int) -> Wanted:
    s = Sizes(dtype, d, n)
    row_idx = s.meta.row_idx_R
    for E, K in ((8, 2), (300, 10), (4096, 64)):
        logits = torch.zeros(s.T, E, dtype=dtype)
        ids = torch.zeros(s.T, K, dtype=torch.int32)
        index, offsets = torch.zeros(s.T * K, dtype=torch.int32), torch.zeros(E + 1, dtype=torch.int32)
        scores, partials = torch.zeros(s.T, K), torch.zeros(2, s.T * K)
        at = f"E={E} K={K}"
        yield f"router_topk {at}", None, partial(router_topk.router_topk, logits, K)
        backward = partial(router_topk.router_topk_backward, partials, index, scores, ids, E, dtype)
        yield f"router_topk_backward {at}", None, backward
        yield f"metadata {at}", None, partial(metadata.metadata, ids, E)
        yield f"restore {at}", None, partial(metadata.restore, index, offsets, scores)
        yield f"tile_map {at}", None, partial(metadata.tile_map, offsets, s.T * K, 64)
        rows = torch.zeros(s.T * K)
        keys, kept = torch.zeros(E, s.T, dtype=torch.int32), torch.zeros(E, s.T, dtype=torch.int8)
        counts, draws, sums = offsets[:-1].clone(), torch.zeros(E), torch.zeros(2, E)
        made = plan.Plan(metadata.Metadata(offsets, index, index, index, s.T), torch.zeros(s.T + 1).int(), index, rows)
        for who, chosen in (("", (ids, scores)), (" experts choose", (None, None))):
            yield f"rank {at}{who}", None, partial(token_rounding.rank, logits, *chosen)
            yield f"d_logits {at}{who}", None, partial(token_rounding.d_logits, logits, chosen[0], rows, made)
        yield f"select {at}", None, partial(token_rounding.select, keys, counts)
        yield f"score_sums {at}", None, partial(token_rounding.score_sums, keys, counts, 128)
        for rule in token_rounding.RULES:
            yield f"targets {rule} {at}", None, partial(token_rounding.targets, counts, s.T, 16, rule, draws, sums)
        yield f"plan_of_mask {at}", None, partial(plan.plan_of_mask, kept.T, keys.T, s.T * K)
    for T in (32768, 40960):  # all that the registers hold, more than that
        keys = torch.zeros(2, T, dtype=torch.int32)
        yield f"select T={T}", None, partial(token_rounding.select, keys, torch.zeros(2, dtype=torch.int32))
    yield "sum_rows", None, partial(plan.sum_rows, s.rows, made, rows)
    yield "sum_parts", None, partial(plan.sum_parts, torch.zeros(2, s.T * K), made)
    yield "aggregate", None, partial(aggregate.aggregate, s.rows, row_idx, s.scores_TK, s.T, s.K)
    yield "aggregate slots", None, partial(aggregate.aggregate, s.rows, None, None, s.T, s.K)
    yield "gather_rows", None, partial(aggregate.gather_rows, s.x, s.meta.gather_idx_R)
    yield "gather_rows scaled", None, partial(aggregate.gather_rows, s.x, s.meta.gather_idx_R, s.scores_R)
    yield "scores_of_y", None, partial(aggregate.scores_of_y, s.x, s.rows, s.meta.gather_idx_R, None)
    yield "scores_of_y slots", None, partial(aggregate.scores_of_y, s.x, s.rows, s.meta.gather_idx_R, row_idx)
    yield "swiglu", None, partial(up_proj.swiglu, s.h)
    yield "d_swiglu", None, partial(d_act.d_swiglu, s.a, s.h, s.scores_R)
    yield "d_swiglu without A'", None, partial(d_act.d_swiglu, s.a, s.h, s.scores_R, False)
    yield "d_scores", None, partial(d_act.d_scores, torch.zeros(2, s.T * s.K), row_idx)


def tuned() -> Wanted:
    """Each distinct (kernel, sizes, dtype, tile) of the committed files; E changes nothing in the code.

    In Hopper kernels, whose candidates are all compiled at two sizes of real layers, d and n change little more than
    trip counts and masks.
    """
    seen = set()
    for path in sorted((Path(tuning.__file__).parent / "tuned").glob("*.json")):
        for key, fields in json.loads(path.read_text()).items():
            kernel, *rest = key.split()
            *_, dtype, version = rest
            at = dict(part.split("=") for part in rest if "=" in part)
            tile, d, n = tile_of(fields), int(at["d"]), int(at["n"])
            of_hopper = kernel.startswith("hopper.")
            sizes = (d % tile.k, n % tile.k) if of_hopper else (d, n)
            entry = (kernel, sizes, dtype, replace(tile, group=0))
            if at["triton"] != triton.__version__ or entry in seen:
                continue
            seen.add(entry)
            inputs = Sizes(getattr(torch, dtype), d, n)
            name = kernel.removeprefix("hopper.")
            yield key, tile, (inputs.hopper if of_hopper else inputs.gemm)(name, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    groups = ("tiles", "variants", "others", "tuned", "hopper", "hopper_variants")
    parser.add_argument("group", nargs="?", default="tiles", choices=groups)
    parser.add_argument("--dtype", default="bf16", choices=_DTYPES)
    parser.add_argument("--d", type=int, default=1536)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--filter", default="")
    parser.add_argument("--distinct", action="store_true")
    asked = parser.parse_args()
    at = (_DTYPES[asked.dtype], asked.d, asked.n)
    wanted = {
        "tiles": lambda: tiles(*at, asked.distinct),
        "variants": lambda: variants(*at),
        "others": lambda: others(*at),
        "hopper": lambda: hopper_family(*at, asked.distinct),
        "hopper_variants": lambda: hopper_variants(*at),
        "tuned": tuned,
    }[asked.group]()
    for name, tile, call in wanted:
        if not re.search(asked.filter, f"{name} {tile}"):
            continue
        launches = captured(call)
        for launch in launches if tile is None else launches[-1:]:
            begun = time.perf_counter()
            counts = counted(compiled(launch))
            seconds = round(time.perf_counter() - begun, 1)
            line = {
                "name": name,
                "kernel": launch.kernel.__name__,
                "tile": tile and asdict(tile),
                **counts,
                "s": seconds,
            }
            print(json.dumps({"triton": triton.__version__, **line}), flush=True)


if __name__ == "__main__":
    main()
