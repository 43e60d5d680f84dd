"""Rows for the tests of `analysis`: what the sweeps would leave, with made-up times that follow simple rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from analysis import figures, paper
from sonic.record import KernelTime, Knobs, Method, Routing, Row, ShapeSpec, TileSpec, append_row
from sonic.shapes import Shape
from tests.rows import make_row

H200 = "nvidia-h200"
#: Time over that of `sonic`.
SLOWER = {
    "sonic": 1.0, "sonicmoe_official": 1.1, "scattermoe": 2.0, "torch_grouped_mm": 1.5, "cublas_bmm": 0.8,
    "torch_loop": 3.0,
}  # fmt: skip
#: Made-up roofs: TFLOP/s of the best product, GB/s of the copy.
PEAK, BANDWIDTH = 700, 4000
#: The layer's kernels in launch order: name, step in `paper.io_bytes` (None: router and metadata), what multiplies
#: R n d in its FLOPs.
LAYER_KERNELS = {
    "fwd": (
        ("nvjet_sm90_router", None, 0), ("_topk_kernel", None, 0), ("_scatter_kernel", None, 0),
        ("_up_proj_kernel", "up_proj", 4), ("_grouped_gemm_kernel", "down_proj", 2),
        ("_aggregate_kernel", "aggregate", 0),
    ),
    "bwd": (
        ("_restore_kernel", None, 0), ("_d_act_kernel", "d_act", 2), ("_weight_grad_kernel", "weight_grad_2", 2),
        ("_grouped_gemm_kernel", "d_input", 4), ("_aggregate_kernel", "d_aggregate", 0),
        ("_weight_grad_kernel", "weight_grad_1", 4),
    ),
}  # fmt: skip
KERNELS = ("up_proj", "down_proj", "d_act", "d_input", "weight_grad_1", "weight_grad_2")


def measured(shape: Shape, impl: str = "sonic", gpu: str = H200, us: float = 1000.0, **changes: Any) -> Row:
    """An `ok` row of a shape; its samples are `us` and 10% below and above it. Any field of a row can be given."""
    mode, cpu = changes.get("mode", "fwd"), gpu == "cpu"
    samples = [0.9 * us, us, 1.1 * us]
    flops = shape.flops(mode)
    given = {
        "shape": ShapeSpec(T=shape.T, d=shape.d, n=shape.n, E=shape.E, K=shape.K),
        "impl": impl, "gpu": gpu, "mode": mode, "R": shape.R,
        "knobs": Knobs(family="triton" if impl == "sonic" else "torch"),
        "event_us": [2 * sample for sample in samples] if not cpu else samples,
        "device_us": None if cpu else samples,
        "method": Method(version=1, timer="wall" if cpu else "cuda", l2="cold", warmup=1, samples=3),
        "flops_model": flops, "flops_padded": flops + flops // 16, "bytes_model": 10**9,
        "held_bytes": paper.held_bytes(impl, shape) or paper.held_bytes("standard_style", shape),
        "peak_fwd_bytes": None if cpu else 2 << 30, "peak_bwd_bytes": None if cpu else 3 << 30,
        "time": "2026-01-02T00:00:00+00:00",
    }  # fmt: skip
    given |= changes
    given.setdefault(
        "key", repr([given[name] for name in ("impl", "shape", "mode", "gpu")] + sorted(map(repr, changes.items())))
    )
    return make_row(**given)


def unmeasured(shape: Shape, status: str, reason: str | None = None, **changes: Any) -> Row:
    """A row without a measurement."""
    empty = (
        "event_us", "device_us", "method", "flops_model", "flops_padded", "bytes_model", "held_bytes", "peak_fwd_bytes",
        "peak_bwd_bytes", "errors", "R",
    )  # fmt: skip
    return measured(shape, **(dict.fromkeys(empty) | {"status": status, "reason": reason} | changes))


def time_us(shape: Shape, impl: str, mode: str = "fwd") -> float:
    """The made-up median: `sonic` runs at 500 model TFLOP/s, the others by `SLOWER`."""
    return shape.flops(mode) / 500e6 * SLOWER[impl]


def granularity() -> Iterator[Row]:
    """7B and 30B with scattermoe out of memory at the finest 7B shape and megablocks missing everywhere."""
    for size in ("7B", "30B"):
        for n, *_ in paper.CONFIGS[size]:
            shape = paper.shape(size, n)
            for mode in ("fwd", "fwd_bwd"):
                for impl in ("sonic", "scattermoe", "torch_grouped_mm"):
                    if (impl, size, n) == ("scattermoe", "7B", 256):
                        yield unmeasured(shape, "oom", impl=impl, mode=mode, sweep="granularity")
                    else:
                        yield measured(shape, impl, us=time_us(shape, impl, mode), mode=mode, sweep="granularity")
                yield unmeasured(
                    shape, "unavailable", "not installed", impl="megablocks", mode=mode, sweep="granularity"
                )
            for impl in ("sonic", "cublas_bmm"):
                bound = {"op": "experts", "routing": Routing(distribution="balanced"), "held_bytes": None}
                yield measured(shape, impl, us=time_us(shape, impl), sweep="granularity", **bound)


def sparsity() -> Iterator[Row]:
    """Two panels of Fig 16 with a crash at the sparsest point of one."""
    for d, n, K, experts in paper.FIG16_PANELS[1::2]:
        for E in experts:
            shape = Shape(paper.FIG16_T, d, n, E, K)
            for mode in ("fwd", "fwd_bwd"):
                for impl in ("sonic", "scattermoe"):
                    common = {
                        "impl": impl,
                        "mode": mode,
                        "op": "experts",
                        "routing": Routing(distribution="uniform"),
                        "sweep": "sparsity",
                    }
                    if (impl, E) == ("scattermoe", 256):
                        yield unmeasured(shape, "crashed", **common)
                    else:
                        yield measured(shape, us=time_us(shape, impl, mode), **common)


def tiles() -> Iterator[Row]:
    """Six kernels, four tiles, the largest of which does not fit."""
    shape = paper.shape("7B", 256)
    for number, op in enumerate(KERNELS):
        for m in (64, 128):
            for k in (32, 64):
                common = {"op": op, "tile": TileSpec(m=m, n=128, k=k, stages=4), "sweep": "tile"}
                if (m, k) == (128, 64):
                    yield unmeasured(
                        shape, "out_of_resources", "shared memory: 300000 needed, 232448 allowed", **common
                    )
                else:
                    yield measured(shape, us=1000.0 + m + k + number, **common)


def layer_kernels(shape: Shape, mode: str, slower: float = 1.0) -> list[KernelTime]:
    """The kernels of a layer of `sonic` with the FLOPs and bytes that its rows hold: at 0.8 of `PEAK`, or where there
    are no FLOPs of `BANDWIDTH`, or `slower`; router and metadata take 10 us each."""
    moved = paper.io_bytes(shape).set_index("kernel").bytes
    found = []
    for direction in ("fwd", "bwd") if mode == "fwd_bwd" else ("fwd",):
        for name, step, factor in LAYER_KERNELS[direction]:
            if step is None:
                found.append(KernelTime(name=name, us=10.0))
                continue
            flops, size = factor * shape.R * shape.n * shape.d, int(moved[step])
            us = flops / PEAK / 1e6 if flops else size / BANDWIDTH / 1e3
            found.append(KernelTime(name=name, us=slower * us / 0.8, flops=flops, bytes=size))
    return found


def throughput(others: Iterable[str] = ()) -> Iterator[Row]:
    """7B and 30B: both families of `sonic`, the official package 10% behind but for one shape, where it is 10% ahead,
    scattermoe out of memory at 30B n=256, megablocks missing, the bound without the finest 30B shape; and `others`."""
    slower = {("triton", "sonic"): 1.25}
    for size in ("7B", "30B"):
        for n, *_ in paper.CONFIGS[size]:
            shape = paper.shape(size, n)
            for mode in ("fwd", "fwd_bwd"):
                for family, impl in (
                    ("hopper", "sonic"), ("triton", "sonic"), ("auto", "sonicmoe_official"), ("triton", "scattermoe"),
                    *(("torch", name) for name in others),
                ):  # fmt: skip
                    given = {"impl": impl, "mode": mode, "knobs": Knobs(family=family), "sweep": "throughput"}
                    if (impl, size, n) == ("scattermoe", "30B", 256):
                        yield unmeasured(shape, "oom", **given)
                        continue
                    factor = slower.get((family, impl), SLOWER.get(impl, 2.5))
                    if (impl, size, n) == ("sonicmoe_official", "7B", 1024):
                        factor = 0.9
                    kernels = layer_kernels(shape, mode, factor) if impl == "sonic" else None
                    yield measured(shape, us=shape.flops(mode) / 500e6 * factor, kernels=kernels, **given)
                yield unmeasured(
                    shape, "unavailable", "not installed", impl="megablocks", mode=mode, sweep="throughput"
                )
            for impl in ("sonic", "cublas_bmm"):
                bound = {"op": "experts", "routing": Routing(distribution="balanced"), "sweep": "throughput"}
                if (impl, size, n) == ("cublas_bmm", "30B", 256):
                    yield unmeasured(shape, "oom", impl=impl, **bound)
                else:
                    knobs = {"knobs": Knobs(family="hopper")} if impl == "sonic" else {}
                    yield measured(shape, impl, us=time_us(shape, impl), **bound, **knobs)


def skew() -> Iterator[Row]:
    """Two shapes: `sonic` loses 10% to zipf and 20% to one hot expert, the official package 21% and nothing, and
    scattermoe crashes under the hot expert."""
    loss = {("sonic", "zipf"): 1.1, ("sonic", "hot"): 1.2, ("sonicmoe_official", "zipf"): 1.21}
    for size, n in (("7B", 256), ("30B", 1024)):
        shape = paper.shape(size, n)
        for distribution in ("uniform", "zipf", "hot"):
            for mode in ("fwd", "fwd_bwd"):
                for impl in ("sonic", "sonicmoe_official", "scattermoe"):
                    given = {"impl": impl, "op": "experts", "mode": mode, "sweep": "skew"}
                    given["routing"] = Routing(distribution=distribution)
                    if (impl, distribution) == ("scattermoe", "hot"):
                        yield unmeasured(shape, "crashed", **given)
                    else:
                        us = time_us(shape, impl, mode) * loss.get((impl, distribution), 1.0)
                        yield measured(shape, us=us, **given)


def ceilings(**changes: Any) -> Iterator[Row]:
    """Three products, the second of which reaches `PEAK`, and a copy at `BANDWIDTH`."""
    given = {"impl": "ceilings", "sweep": "ceilings", "held_bytes": None, "flops_padded": None} | changes
    for share, (M, N, K) in ((0.9, (8192, 8192, 8192)), (1.0, (131072, 2048, 1536)), (0.95, (131072, 4096, 2048))):
        flops, shape = 2 * M * N * K, Shape(M, K, N, 1, 1)
        yield measured(shape, us=flops / share / PEAK / 1e6, op="matmul", **(given | {"flops_model": flops}))
    size = {"flops_model": 0, "bytes_model": 4 * 524288 * 4096}
    yield measured(Shape(524288, 4096, 1, 1, 1), us=size["bytes_model"] / BANDWIDTH / 1e3, op="copy", **(given | size))


def overview(sweep: str, gpu: str) -> Iterator[Row]:
    """Three granularities and three sparsities, with two tiles of `sonic`."""
    base = Shape(64, 64, 16, 8, 2)
    for G in (2, 4, 8):
        for rho in ("1/2", "1/4", "1/8"):
            shape = base.with_granularity(G).with_rho(rho)
            for tile in (16, 32):
                yield measured(
                    shape, gpu=gpu, us=50.0 * tile, mode="fwd_bwd", tile=TileSpec(m=tile, n=tile), sweep=sweep
                )
            for impl in ("torch_loop", "torch_grouped_mm"):
                yield measured(shape, impl, gpu, us=100.0 * SLOWER[impl], mode="fwd_bwd", sweep=sweep)
            yield unmeasured(
                shape, "unavailable", "not installed", impl="scattermoe", gpu=gpu, mode="fwd_bwd", sweep=sweep
            )


def everything() -> list[Row]:
    """Rows for every figure: `smoke` of a CPU, the rest of an H200."""
    return [
        *granularity(), *sparsity(), *tiles(), *throughput(), *skew(), *ceilings(), *overview("smoke", "cpu"),
        *overview("quick", H200),
    ]  # fmt: skip


def check_sheet(drawn: figures.Drawn) -> None:
    """The figure is a PNG of a usual size, and nothing hangs over the edge of its sheet."""
    assert figures.png(drawn.figure, dpi=50).startswith(b"\x89PNG")
    inches = drawn.figure.get_size_inches()
    assert 4 < inches[0] < 20 and 2 < inches[1] < 20
    drawn.figure.canvas.draw()
    box = drawn.figure.get_tightbbox()
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < inches[0] + 0.02 and box.y1 < inches[1] + 0.02


def write(results: Path, rows: Iterable[Row]) -> Path:
    """Appends rows to their files in `results`; returns the folder."""
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(results / row.sweep / f"{row.gpu}.jsonl", []).append(row)
    for path, group in by_file.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        for row in group:
            append_row(path, row)
    return results
