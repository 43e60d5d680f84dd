"""Points, rows and environments for tests, with every field that a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from sonic.env import Env
from sonic.record import Point, Row, ShapeSpec, now


def make_point(n: int = 16, **changes: Any) -> Point:
    """A tiny point; `n` sets the expert size."""
    given = {"sweep": "smoke", "impl": "sonic", "shape": ShapeSpec(T=16, d=64, n=n, E=8, K=2)}
    return Point(**(given | changes))


def make_row(n: int = 16, **changes: Any) -> Row:
    """A row that is `ok`, with a median of 110 us; its key follows from impl and n unless given."""
    fields = {name: changes.pop(name) for name in list(changes) if name in Point.model_fields}
    point = make_point(n, **fields)
    given = {
        "status": "ok",
        "key": f"{point.impl}-{n}",
        "run_id": "run1",
        "impl_version": "1.0",
        "gpu": "cpu",
        "env_id": "env1",
        "commit": "c0ffee",
        "time": now(),
        "event_us": [120.0, 100.0, 110.0],
        "flops_model": 11_000_000,
        "bytes_model": 1_100_000,
        "held_bytes": 1 << 20,
        "errors": {"twin.o": 0.5, "full.dw1": 1.25},
    }
    return Row(**dict(point), **(given | changes))


def make_env(**changes: Any) -> Env:
    """An environment without a GPU."""
    given = {"env_id": "env1", "commit": "c0ffee", "dirty": False, "gpu": "cpu", "python": "3.11.7", "system": "Linux"}
    return Env(**(given | changes))
