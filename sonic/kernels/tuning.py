"""Which tile a GEMM kernel runs with.

Choices for known cards are committed in `tuned/<gpu>.json`; a user's own go to the folder `SONIC_CACHE` (default
`~/.cache/sonic`). The key holds kernel, d, n, E, dtype and triton version, never T or R, which change with every batch.
SONIC_TUNE=cached (the default) looks the choice up and else takes the kernel's first candidate, `full` measures the
candidates where nothing is known and keeps the winner, `off` always takes the first candidate.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import triton
from filelock import FileLock
from triton.runtime.errors import OutOfResources, PTXASError

from sonic.kernels.common import INTERPRET, Tile, tile_of
from sonic.shapes import gpu_slug

_COMMITTED = Path(__file__).parent / "tuned"
#: Seconds spent in measuring candidates by this process.
tune_seconds = 0.0
_chosen: dict[tuple, Tile] = {}


def mode() -> str:
    """`cached`, `full` or `off`, from the environment variable SONIC_TUNE. ValueError for anything else."""
    value = os.environ.get("SONIC_TUNE", "cached")
    if value not in ("cached", "full", "off"):
        raise ValueError(f"SONIC_TUNE is {value!r}; allowed: cached, full, off")
    return value


@cache
def _card() -> str | None:
    return gpu_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() and not INTERPRET else None


def user_file(card: str) -> Path:
    return Path(os.environ.get("SONIC_CACHE", Path.home() / ".cache" / "sonic")) / f"tuned-{card}.json"


@cache
def _known(card: str) -> dict[str, Tile]:
    """Committed choices, with a user's own laid over them."""
    tiles: dict[str, Tile] = {}
    for path in (_COMMITTED / f"{card}.json", user_file(card)):
        if path.exists():
            tiles |= _read(path)
    return tiles


def _read(path: Path) -> dict[str, Tile]:
    """Choices of one file. A user's file that is damaged or of another version is passed over with a warning."""
    try:
        return {key: tile_of(value) for key, value in json.loads(path.read_text()).items()}
    except (ValueError, TypeError) as error:
        if path.parent == _COMMITTED:
            raise
        warnings.warn(f"{path} is not read: {error}; delete it to tune anew", stacklevel=2)
        return {}


def entry(kernel: str, d: int, n: int, E: int, dtype: torch.dtype) -> str:
    """Key of a choice in the files."""
    return f"{kernel} d={d} n={n} E={E} {str(dtype).removeprefix('torch.')} triton={triton.__version__}"


def choose(
    kernel: str,
    d: int,
    n: int,
    E: int,
    dtype: torch.dtype,
    candidates: Callable[[], list[Tile]],
    run: Callable[..., object],
) -> Tile:
    """The tile for a kernel at these sizes, out of `candidates()`; `run(tile=...)` launches it once on the caller's
    tensors."""
    at = (kernel, d, n, E, dtype)
    if at not in _chosen:
        _chosen[at] = _decide(entry(*at), candidates(), run)
    return _chosen[at]


def known(kernel: str, d: int, n: int, E: int, dtype: torch.dtype) -> Tile | None:
    """The tile that ran at these sizes in this process, else the one in the files, else None."""
    at = (kernel, d, n, E, dtype)
    if at in _chosen:
        return _chosen[at]
    card = _card()
    return None if card is None or mode() == "off" else _known(card).get(entry(*at))


def measured(kernel: str, d: int, n: int, E: int, dtype: torch.dtype) -> bool:
    """Whether the files hold a choice for these sizes on this card."""
    card = _card()
    return card is not None and mode() != "off" and entry(kernel, d, n, E, dtype) in _known(card)


def _decide(key: str, candidates: list[Tile], run: Callable[..., object]) -> Tile:
    card = _card()
    if card is None or mode() == "off":
        return candidates[0]
    tiles = _known(card)
    if key not in tiles:
        if mode() == "cached":
            return candidates[0]
        tiles[key] = _measure(candidates, run)
        _keep(user_file(card), key, tiles[key])
    return tiles[key]


def _measure(candidates: list[Tile], run: Callable[..., object]) -> Tile:
    """The fastest candidate by median time with a cold L2; one that does not fit the card is passed over."""
    global tune_seconds
    begun = time.perf_counter()
    times: dict[Tile, float] = {}
    for tile in candidates:
        try:
            run(tile=tile)
            times[tile] = triton.testing.do_bench(lambda t=tile: run(tile=t), warmup=10, rep=40, return_mode="median")
        except (OutOfResources, PTXASError):
            continue
    tune_seconds += time.perf_counter() - begun
    if not times:
        raise RuntimeError(f"none of the {len(candidates)} candidate tiles fits this card")
    return min(times, key=times.get)


def _keep(path: Path, key: str, tile: Tile) -> None:
    """Add one choice to a user's file; several processes may tune at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        tiles = {name: asdict(known) for name, known in _read(path).items()} if path.exists() else {}
        tiles[key] = asdict(tile)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(tiles, indent=1, sort_keys=True) + "\n")
        partial.replace(path)
