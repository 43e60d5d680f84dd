"""What every test runs under: Triton's interpreter where there is no GPU, and outputs that start as NaN."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

# Read when triton is imported, which importing torch does not do. A child process that only compiles removes it again.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: An index that nobody wrote: far outside of every tensor here, in either direction.
POISON = -(1 << 30)


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """The tensor filled with NaN, or with `POISON` where it holds integers; fake and functional tensors as they are."""
    if type(t) is not torch.Tensor or isinstance(t, FakeTensor) or torch._is_functional_tensor(t):
        return t
    with torch.no_grad():
        if t.dtype.is_floating_point:
            t.fill_(float("nan"))
        elif t.dtype in (torch.int32, torch.int64):
            t.fill_(POISON)
    return t


def _poisoning(make: Callable) -> Callable:
    def wrapped(*args, **kwargs):
        made = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poisoned(made) if caller.partition(".")[0] == "sonic" else made

    return wrapped


# Made once and known to torch.compile, which would otherwise trace into them and stop at torch's own function.
_EMPTY = {name: torch.compiler.allow_in_graph(_poisoning(getattr(torch, name))) for name in ("empty", "empty_like")}
_NEW_EMPTY = _poisoning(torch.Tensor.new_empty)


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty`, `empty_like` and `new_empty` hand out poison in `sonic`, so that an unwritten output shows."""
    for name, poisoning in _EMPTY.items():
        monkeypatch.setattr(torch, name, poisoning)
    monkeypatch.setattr(torch.Tensor, "new_empty", _NEW_EMPTY)
