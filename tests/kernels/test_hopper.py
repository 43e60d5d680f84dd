"""What the launchers of the Hopper family do on the host: tiles that they refuse, and operands that they hand on.

Nothing is launched. `tests.test_compile_only` compiles the kernels, `tests.test_gpu_hopper` runs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sonic import layer
from sonic.impls.sonic import Impl
from sonic.kernels import hopper, metadata
from sonic.kernels.common import SMEM_LIMIT, HopperTile, Tile
from sonic.kernels.hopper import pipeline
from sonic.problem import Problem
from sonic.record import Knobs, Point, Routing, ShapeSpec, TileSpec
from tests.oracle import GEMMS, hopper_tiles

T, K, E = 17, 2, 5
#: Of each step the tensors that TMA or 16-byte copies read or write, in the order of its arguments.
OPERANDS = {
    "up_proj": ("x", "w1"),
    "down_proj": ("a", "w2"),
    "d_input": ("h", "w1"),
    "d_act": ("x", "w2", "h"),
    "d_act_gemm": ("x", "w2"),
    "weight_grad_1": ("x", "h", "w1"),
    "weight_grad_2": ("x", "a", "w2"),
}
#: The module of the portable step where it is not named like the step.
PORTABLE = {"d_act_gemm": "d_act", "weight_grad_1": "weight_grad", "weight_grad_2": "weight_grad"}


class Layer:
    """Zeros of every kind that a step takes."""

    def __init__(self, d: int = 64, n: int = 72) -> None:
        self.meta = metadata.metadata_torch(torch.arange(T * K, dtype=torch.int32).view(T, K) % E, E)
        sizes = {"x": (T, d), "a": (T * K, n), "h": (T * K, 2 * n), "w1": (E, 2, n, d), "w2": (E, d, n)}
        self.tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}

    def call(self, step: str, **options: object) -> object:
        operands = [self.tensors[name] for name in OPERANDS[step]]
        if step == "d_act":
            operands.append(torch.zeros(T * K))
        return hopper.STEPS[step](*operands, self.meta, **options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Launches of Hopper kernels by name of kernel, arguments by name, and options, in the place of running them."""
    found = []

    def launch_sized(kernel, sizes: tuple, tensors: tuple, build: Callable) -> None:
        grid, arguments, options = build()
        hash(sizes)
        # a later launch of these sizes fills in the addresses of `tensors` and nothing else
        given = [t.data_ptr() for t in tensors if t is not None]
        bases = (getattr(argument, "base", argument) for argument in arguments)
        assert {t.data_ptr() for t in bases if isinstance(t, torch.Tensor)} <= set(given)
        assert len(set(given)) == len(given)
        named = dict(zip(kernel.arg_names, arguments, strict=True))
        found.append(SimpleNamespace(name=kernel.__name__, grid=grid, options=options, sizes=sizes, **named))

    for module in (hopper.up_proj, hopper.grouped_gemm, hopper.d_act, hopper.weight_grad):
        monkeypatch.setattr(module, "launch_sized", launch_sized)
    return found


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """Keyword arguments of every portable step that is called, in the place of running it."""
    found = {}

    def spy(step: str) -> Callable:
        return lambda *_operands, **options: found.update({step: options})

    for step in OPERANDS:
        module = importlib.import_module(f"sonic.kernels.{PORTABLE.get(step, step)}")
        monkeypatch.setattr(module, step, spy(step))
    return found


# --- tiles


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (HopperTile(k=32), r"tile 128x256x32 with schedule cooperative: .* takes k = 64"),
        (HopperTile(m=64), "tile 64x256x64 with schedule cooperative: .* at least 64 rows per warpgroup"),
        (HopperTile(m=32, n=64, schedule="pingpong"), "tile 32x64x64 with schedule pingpong"),
        (HopperTile(m=512, n=64), "tile 512x64x64"),
        (HopperTile(n=32), r"tile 128x32x64 .* n in 64..256"),
        (HopperTile(n=512), r"tile 128x512x64 .* n in 64..256"),
        (HopperTile(m=256), "tile 256x256x64 with schedule cooperative exceeds a warpgroup's registers"),
        (HopperTile(schedule="pingpong"), "tile 128x256x64 with schedule pingpong exceeds a warpgroup's registers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tile_that_no_schedule_runs_is_named(tile: HopperTile, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pipeline.fits(tile, 0)


def test_a_tile_that_exceeds_shared_memory_names_need_and_limit() -> None:
    ring = 4 * (128 + 256) * 64 * 2
    room = SMEM_LIMIT - ring - 1024
    pipeline.fits(HopperTile(), room)
    with pytest.raises(OutOfResources, match=f"128x256x64 with 4 stages needs {SMEM_LIMIT + 8} bytes.*{SMEM_LIMIT}"):
        pipeline.fits(HopperTile(), room + 8)


@pytest.mark.parametrize("step", OPERANDS)
def test_the_launchers_refuse_such_tiles(step: str, launched: list) -> None:
    for tile in (HopperTile(k=32), HopperTile(m=256), HopperTile(128, 128, schedule="pingpong", stages=8)):
        with pytest.raises((ValueError, OutOfResources), match=f"tile {tile.m}x{tile.n}|cooperative only"):
            Layer().call(step, tile=tile)
    assert launched == []


@pytest.mark.parametrize("step", ["weight_grad_1", "weight_grad_2"])
def test_weight_gradients_run_cooperative_only(step: str, launched: list) -> None:
    with pytest.raises(ValueError, match="schedule is 'pingpong'; the weight gradients run cooperative only"):
        Layer().call(step, tile=HopperTile(128, 128, schedule="pingpong"))


def check_launch(launch: SimpleNamespace) -> None:
    """What the kernel relies on and no compiler checks."""
    chunks = launch.BLOCK_N // launch.CHUNK
    rows = launch.BLOCK_M if getattr(launch, "PINGPONG", False) else launch.BLOCK_M // 2
    match launch.name:
        case "_up_proj_kernel":
            stores = chunks // 2 * (2 * launch.WITH_H + launch.WITH_ACT)
        case "_d_act_kernel":
            stores = 0  # a tile begins when every store of the last one is through
            assert rows // 64 * chunks % launch.SLOTS == 0, "a slot would hold another tile's chunk of H"
        case _:
            stores = chunks
    assert launch.name == "_d_act_kernel" or stores, "no chunk is as narrow as the tile"
    assert stores % launch.BUFFERS == 0, f"{stores} stores of a tile go round {launch.BUFFERS} buffers"
    assert launch.options == {"num_warps": 4, "maxnreg": 168} and launch.K == 64


@pytest.mark.parametrize(("d", "n"), [(64, 72), (1536, 256), (200, 64), (8, 8)])
@pytest.mark.parametrize("step", OPERANDS)
def test_every_shipped_tile_is_launched(step: str, d: int, n: int, launched: list) -> None:
    tiles = hopper_tiles(d, n)[step]
    inputs = Layer(d, n)
    for tile in tiles:
        inputs.call(step, tile=tile)
    inputs.call(step)
    assert len(launched) == len(tiles) + 1 and tiles
    for launch, tile in zip(launched, [*tiles, tiles[0]], strict=True):
        check_launch(launch)
        assert (launch.BLOCK_M, launch.BLOCK_N, launch.STAGES) == (tile.m, tile.n, tile.stages)


@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
@pytest.mark.parametrize("step", OPERANDS)
def test_a_tile_asked_for_is_refused_or_right(step: str, schedule: str, launched: list) -> None:
    """`tile.m` and `tile.n` change a candidate's sizes and leave its buffers as they are."""
    inputs, wrong = Layer(), []
    for base in dict.fromkeys(t for t in hopper_tiles(1536, 256)[step] if t.schedule == schedule):
        for m in (64, 128, 256):
            for n in (64, 128, 256):
                launched.clear()
                tile = base.override(m=m, n=n, stages=2)
                try:
                    inputs.call(step, tile=tile)
                except (ValueError, OutOfResources) as refusal:
                    assert f"{m}x{n}" in str(refusal)
                    continue
                try:
                    check_launch(launched[-1])
                except AssertionError as error:
                    wrong.append(f"{m}x{n} with {tile.buffers} buffers: {str(error).splitlines()[0]}")
    assert wrong == []


# --- launches that are kept


def wide_rows(t: torch.Tensor) -> torch.Tensor:
    """t as the left part of a wider tensor, which TMA takes as well."""
    return torch.zeros(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)[..., :-8]


def interleaved(w1: torch.Tensor) -> torch.Tensor:
    return w1.transpose(1, 2).contiguous().transpose(1, 2)


def but_addresses(launch: SimpleNamespace) -> tuple:
    """Everything about a launch that is no address."""
    found = []
    for name, argument in vars(launch).items():
        if hasattr(argument, "block_shape"):
            argument = (argument.base.dtype, argument.shape, argument.strides, argument.block_shape)
        elif isinstance(argument, torch.Tensor):
            argument = argument.dtype
        if name != "sizes":
            found.append((name, str(argument)))
    return tuple(found)


@pytest.mark.parametrize("step", OPERANDS)
def test_the_sizes_of_a_launch_say_all_but_addresses(step: str, launched: list) -> None:
    """A launch is kept by them: with two meanings of the same sizes the second would run as the first."""
    inputs = [Layer(), Layer(72, 64), Layer(64, 64)]
    changes = [(name, wide_rows) for name in OPERANDS[step]] + [("w1", interleaved)] * ("w1" in OPERANDS[step])
    for name, change in changes:
        changed = Layer()
        changed.tensors[name] = change(changed.tensors[name])
        inputs.append(changed)
    halved = Layer()
    halved.tensors |= {name: t.half() for name, t in halved.tensors.items()}
    for each in [*inputs, halved]:
        for tile in (HopperTile(128, 128), HopperTile(128, 128, group=4), HopperTile(128, 128, buffers=1)):
            each.call(step, tile=tile)
            if step not in ("down_proj", "d_input"):
                each.call(step, tile=tile, gather=False)
    meanings: dict[tuple, set] = {}
    for launch in launched:
        meanings.setdefault((launch.name, launch.sizes), set()).add(but_addresses(launch))
    assert [sizes for sizes, found in meanings.items() if len(found) > 1] == []


# --- operands that are the portable family's


def misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


def odd_rows(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype)[..., :-1]


def odd_columns(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def empty(t: torch.Tensor) -> torch.Tensor:
    return t[:0]


@pytest.mark.parametrize("change", [misaligned, odd_rows, odd_columns, empty], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("step", "operand"), [(step, name) for step, names in OPERANDS.items() for name in names])
def test_what_tma_cannot_take_goes_to_the_portable_step(
    step: str, operand: str, change: Callable, launched: list, handed_on: dict[str, dict]
) -> None:
    """With its own choice of a tile: a Hopper tile would mean nothing to it."""
    inputs = Layer()
    inputs.tensors[operand] = change(inputs.tensors[operand])
    gather = {} if step in ("down_proj", "d_input") else {"gather": False}
    inputs.call(step, tile=HopperTile(128, 128), **gather)
    assert launched == [] and list(handed_on) == [step]
    assert "tile" not in handed_on[step]
    assert gather.items() <= handed_on[step].items()


@pytest.mark.parametrize("into", ["slots", "tokens"])
@pytest.mark.parametrize("step", ["down_proj", "d_input"])
def test_other_destinations_are_the_portable_steps(step: str, into: str, launched: list, handed_on: dict) -> None:
    scores = {"scores": torch.zeros(T, K)} if step == "down_proj" else {}
    Layer().call(step, into=into, tile=Tile(64, 64), **scores)
    assert launched == []
    assert handed_on == {step: {"into": into, "tile": Tile(64, 64), **scores}}


# --- choices and the adapter


def test_choices_travel_as_text_with_tiles_of_both_kinds() -> None:
    tiles = {"up_proj": HopperTile(128, 128, schedule="pingpong", buffers=3), "down_proj": Tile(64, 32, 16)}
    choices = layer.Choices("hopper", "interleaved", aggregate="atomic", tiles=tiles)
    decoded = layer.Choices.decode(choices.encoded)
    assert decoded == choices
    assert [type(tile) for tile in decoded.tiles.values()] == [HopperTile, Tile]


SHAPE = ShapeSpec(T=17, d=64, n=256, E=5, K=2)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Impl]:
    """The adapter as on a card that runs the Hopper family; it launches nothing when it is made."""
    monkeypatch.setattr(layer, "resolve_family", lambda *_: "hopper")

    def make(**fields: object) -> Impl:
        point = Point(**{"sweep": "test", "impl": "sonic", "mode": "fwd_bwd", "shape": SHAPE, **fields})
        return Impl(Problem(SHAPE.sizes(), Routing(), "bf16", "cpu", 0), point)

    return make


def test_sizes_asked_for_change_the_first_hopper_tile(adapter: Callable[..., Impl]) -> None:
    impl = adapter(tile=TileSpec(n=128, stages=2))
    first = {kernel: tiles[0] for kernel, tiles in hopper_tiles(SHAPE.d, SHAPE.n).items()}
    assert impl.choices.tiles == {kernel: first[kernel].override(n=128, stages=2) for kernel in GEMMS}
    assert {type(tile) for tile in impl.choices.tiles.values()} == {HopperTile}
    tiles = [cost.tile for cost in impl.kernels_cost if cost.tile]
    assert len(tiles) == len(GEMMS) and all((tile["n"], tile["stages"]) == (128, 2) for tile in tiles)


def test_a_schedule_asked_for_takes_a_tile_that_has_it(adapter: Callable[..., Impl]) -> None:
    tiles = adapter(knobs=Knobs(family="hopper", schedule="pingpong")).choices.tiles
    assert {step: tile.schedule for step, tile in tiles.items()} == {
        step: "cooperative" if step.startswith("weight_grad") else "pingpong" for step in GEMMS
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tile": TileSpec(k=32)}, "takes k = 64"),
        ({"tile": TileSpec(n=64)}, "n in 128..256"),
        ({"tile": TileSpec(warps=4)}, "tile.warps is 4"),
        (
            {"tile": TileSpec(n=256), "knobs": Knobs(family="hopper", schedule="pingpong")},
            "exceeds a warpgroup's registers",
        ),
        ({"knobs": Knobs(family="triton", schedule="pingpong")}, "knobs.schedule is 'pingpong'"),
    ],
)
def test_what_no_kernel_can_run_is_unsupported(
    adapter: Callable[..., Impl], monkeypatch: pytest.MonkeyPatch, fields: dict, words: str
) -> None:
    del adapter  # the family is chosen as on a Hopper card
    monkeypatch.setattr(layer, "resolve_family", lambda family, *_: "hopper" if family == "auto" else family)
    point = Point(**{"sweep": "test", "impl": "sonic", "shape": SHAPE, **fields})
    assert words in Impl.supports(point, torch.device("cpu"))


def test_one_kernel_alone_gets_the_tile(adapter: Callable[..., Impl]) -> None:
    tiles = adapter(tile=TileSpec(m=256, n=64, kernel="weight_grad_2")).choices.tiles
    (tile,) = tiles.values()
    assert list(tiles) == ["weight_grad_2"] and isinstance(tile, HopperTile) and (tile.m, tile.n) == (256, 64)
    assert adapter().choices.tiles == {}


@pytest.mark.parametrize("aggregate", ["scatter_sum", "atomic"])
def test_results_that_go_elsewhere_get_a_portable_tile(adapter: Callable[..., Impl], aggregate: str) -> None:
    tiles = adapter(tile=TileSpec(stages=2), knobs=Knobs(family="hopper", aggregate=aggregate)).choices.tiles
    portable = {kernel for kernel, tile in tiles.items() if type(tile) is Tile}
    assert portable == {"down_proj", "d_input"}


def test_a_separate_activation_takes_the_tile_of_its_gemm(adapter: Callable[..., Impl]) -> None:
    impl = adapter(tile=TileSpec(stages=2, kernel="d_act"), knobs=Knobs(family="hopper", activation="separate"))
    assert impl.choices.tiles == {"d_act": hopper_tiles(SHAPE.d, SHAPE.n)["d_act_gemm"][0].override(stages=2)}
