"""Compile the launches of the GEMM kernels for sm_90a on a machine without a GPU and count what came out.

`python -m tests.kernels.compile_sm90 [filter]` prints one line per shipped tile. A process of its own, since
TRITON_INTERPRET must be off when triton is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from sonic.kernels import d_act, d_input, down_proj, grouped_gemm, up_proj, weight_grad
from sonic.kernels.common import SMEM_LIMIT, Tile
from sonic.kernels.metadata import metadata_torch

_BIN = Path(triton.backends.nvidia.__file__).parent / "bin"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher asked for."""

    kernel: JITFunction
    arguments: dict[str, object]
    options: dict[str, int]


def captured(call: Callable[[], object]) -> list[Launch]:
    """Run a launcher on CPU tensors and keep its launches instead of running them."""
    launches: list[Launch] = []
    original = JITFunction.run

    def keep(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: int) -> None:
        del grid, warmup
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)), kwargs))

    JITFunction.run = keep
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def compiled(launch: Launch):
    """Compile a launch as the just-in-time compiler would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}[{block}]>"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)


def counted(kernel) -> dict[str, int]:
    """Registers, shared memory and instruction counts of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([_BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    count = lambda name: len(re.findall(rf"\b{name}", sass))  # noqa: E731
    return {
        "registers": int(registers[1]) if registers else -1,
        "shared": kernel.metadata.shared,
        "spills": count("STL") + count("LDL"),
        "hgmma": count("HGMMA"),
        "tma_loads": count("UTMALDG"),
        "tma_stores": count("UTMASTG"),
        "cp_async": count("LDGSTS"),
        "shared_stores": count("STS"),
    }


def shipped(dtype: torch.dtype, d: int, n: int) -> Iterator[tuple[str, Tile, Callable[[], object]]]:
    """(name, tile, launcher) of every tile that the GEMM kernels may choose at these sizes."""
    T, E, K = 64, 4, 2
    R = T * K
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    meta = metadata_torch(ids, E)
    new = lambda *size: torch.zeros(size, dtype=dtype)  # noqa: E731
    x, w1, w2 = new(T, d), new(E, 2, n, d), new(E, d, n)
    h, a, s = new(R, 2 * n), new(R, n), torch.zeros(R)
    for tile in up_proj.configs(dtype, n):
        yield "up_proj", tile, lambda t=tile: up_proj.up_proj(x, w1, meta, tile=t)
    for tile in grouped_gemm.configs(dtype, d):
        yield "down_proj", tile, lambda t=tile: down_proj.down_proj(a, w2, meta, tile=t)
        yield "d_input", tile, lambda t=tile: d_input.d_input(h, w1, meta, tile=t)
    for tile in d_act.configs(dtype, n):
        yield "d_act", tile, lambda t=tile: d_act.d_act(x, w2, h, s, meta, tile=t)
    for tile in weight_grad.configs(dtype, d):
        yield "weight_grad_1", tile, lambda t=tile: weight_grad.weight_grad_1(x, h, w1, meta, tile=t)
    for tile in weight_grad.configs(dtype, n):
        yield "weight_grad_2", tile, lambda t=tile: weight_grad.weight_grad_2(x, a, w2, meta, tile=t)


def main(chosen: str = "") -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[os.environ.get("DTYPE", "bf16")]
    for name, tile, call in shipped(dtype, 1536, 256):
        label = f"{name} {tile}"
        if not re.search(chosen, label):
            continue
        launches = [launch for launch in captured(call) if "PROGRAMS" in launch.arguments]
        begun = time.perf_counter()
        counts = counted(compiled(launches[-1]))
        fits = counts["shared"] <= SMEM_LIMIT
        print(
            json.dumps(
                {"kernel": name, "tile": str(tile), **counts, "fits": fits, "s": round(time.perf_counter() - begun, 1)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
