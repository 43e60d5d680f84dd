"""A kept launch passes what Triton's own launcher would, with addresses in the place of tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver

from sonic.kernels import common
from sonic.kernels.common import descriptor, launch_sized

META = {"elem_type": 10, "swizzle": 3}


class Record(list):
    """The driver's launch, which is no Python function."""

    def __call__(self, *given: object) -> None:
        self.append(given)


class Compiled(SimpleNamespace):
    """A compiled kernel whose launcher is Triton's, down to the call of the driver, which is recorded."""

    def __init__(self, arguments: tuple, record: Record) -> None:
        described = [hasattr(a, "block_shape") for a in arguments]
        signature = {i: "tensordesc<bf16[1, 1]>" if is_one else "i32" for i, is_one in enumerate(described)}
        metas = [META] * sum(described)
        run = object.__new__(driver.CudaLauncher)
        run.num_ctas = run.global_scratch_align = run.profile_scratch_align = 1
        run.global_scratch_size = run.profile_scratch_size = 0
        run.launch_cooperative_grid, run.launch_pdl = False, False
        run.arg_annotations, run.kernel_signature = "annotations", "signature"
        run.launch = driver.wrap_handle_tensordesc(record, signature, metas)
        metadata = SimpleNamespace(tensordesc_meta=metas)
        super().__init__(run=run, metadata=metadata, function="function", packed_metadata="packed")

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self.run(*grid, "stream", "function", "packed", None, None, None, *arguments)


def flat(call: tuple) -> list[object]:
    """Arguments of the driver's launch, newer Tritons give the kernel's own as one sequence; tensors as addresses."""
    *base, last = call
    whole = [*base, *last] if isinstance(last, (list, tuple)) else [*call]
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in whole]


def arguments_of(x: torch.Tensor, y: torch.Tensor, given: torch.Tensor | None, described: bool) -> tuple:
    d = descriptor(y, [16, 16]) if described else None
    return x, d, given, 3, y, descriptor(x, [8, 8]) if described else None, True


@pytest.mark.parametrize("described", [True, False])
def test_the_third_launch_passes_what_the_first_does(described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()

    def encode(d: object, meta: dict) -> list[object]:
        assert meta is META
        return [("map", d.base.data_ptr(), *d.block_shape), *d.shape, *d.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(common, "make_tensordesc_arg", encode)
    monkeypatch.setattr(common, "INTERPRET", False)
    monkeypatch.setattr(common, "_plans", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)

    def first(_kernel: object, grid: tuple, arguments: tuple, **options: int) -> Compiled:
        assert options == {"num_warps": 8}
        compiled = Compiled(arguments, record)
        compiled[(*grid, 1, 1)[:3]](*arguments)
        return compiled

    monkeypatch.setattr(common, "launch", first)

    def go(x: torch.Tensor, y: torch.Tensor, given: torch.Tensor | None) -> None:
        def build() -> common.Launch:
            return (7,), arguments_of(x, y, given, described), {"num_warps": 8}

        launch_sized(None, (x.dtype, x.shape, y.shape, given is None), (x, y, given), build)

    sets = [[torch.zeros(64, 32), torch.zeros(32, 32), None] for _ in range(4)]
    for tensors in (*sets[:3], sets[2], sets[3]):
        record.clear()
        go(*tensors)
        (got,) = map(flat, record)
        arguments = arguments_of(*tensors, described)
        again = Record()
        Compiled(arguments, again)[7, 1, 1](*arguments)
        assert got == flat(again[0])
    assert common._plans and all(common._plans.values())
    assert not any(t is kept for plan in common._plans.values() for kept in plan.template for t in sets[0][:2])
