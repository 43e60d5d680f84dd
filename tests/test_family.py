"""Which kernel family runs on which card, dtype and sizes, and what is said when it is not the one hoped for.

There is no card here: device, capability and versions are made up.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import triton

from sonic import config, layer
from sonic.impls.sonic import Impl
from sonic.kernels import hopper
from sonic.record import Knobs, Point, Settings, ShapeSpec
from sonic.worker import serve_point

CPU, CARD = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Machine:
    """A machine whose card has any capability; triton is a known one, and kernels are compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for module in (hopper, layer):
            monkeypatch.setattr(module, "INTERPRET", False)
        monkeypatch.setattr(torch.version, "hip", None)
        self.triton("3.7.1")
        self.capability(9, 0)

    def capability(self, *capability: int) -> None:
        self._patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def triton(self, version: str) -> None:
        self._patch.setattr(triton, "__version__", version)

    def hip(self) -> None:
        self._patch.setattr(torch.version, "hip", "6.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    layer._say_once.cache_clear()
    yield Machine(monkeypatch)
    layer._say_once.cache_clear()


def resolved(family: str = "auto", device: torch.device = CARD, dtype=BF16, d: int = 1536, n: int = 256) -> str:
    return layer.resolve_family(family, device, dtype, d, n)


def said(call) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


# --- auto


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("d", "n"), [(1536, 256), (200, 72), (8, 8)])
def test_hopper_runs_where_it_can(machine: Machine, version: str, dtype: torch.dtype, d: int, n: int) -> None:
    machine.triton(version)
    assert said(lambda: resolved(dtype=dtype, d=d, n=n)) == []
    assert resolved(dtype=dtype, d=d, n=n) == "hopper" == resolved("hopper", dtype=dtype, d=d, n=n)


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        ({"dtype": FP32}, "triton"),
        ({"dtype": FP64}, "torch"),
        ({"n": 250}, "triton"),
        ({"d": 1025}, "triton"),
        ({"n": 4}, "triton"),
        ({"device": CPU}, "torch"),
        ({"family": "triton"}, "triton"),
        ({"family": "torch"}, "torch"),
    ],
    ids=str,
)
def test_what_hopper_does_not_take_runs_elsewhere_without_a_word(machine: Machine, asked: dict, runs: str) -> None:
    assert said(lambda: resolved(**asked)) == []
    assert resolved(**asked) == runs


OTHERS = [
    pytest.param(lambda m: m.capability(8, 0), "compute capability 8.0; the hopper family needs .* 9.0", id="A100"),
    pytest.param(lambda m: m.capability(10, 0), "compute capability 10.0; the hopper family needs .* 9.0", id="B200"),
    pytest.param(lambda m: m.triton("3.9.0"), "triton is 3.9.0; the hopper family knows 3.6 and 3.7", id="triton-3.9"),
    pytest.param(lambda m: m.triton("3.60.0"), "triton is 3.60.0; the .* family knows 3.6 and 3.7", id="triton-3.60"),
]


@pytest.mark.parametrize(("other", "text"), OTHERS)
def test_another_card_or_triton_is_named_once(machine: Machine, other, text: str) -> None:
    other(machine)

    def many() -> None:
        assert {resolved(dtype=dtype, n=n) for dtype in (BF16, FP16, FP32) for n in (256, 250)} == {"triton"}

    (message,) = said(many)
    assert message.endswith("; the portable Triton family runs instead")
    with pytest.raises(ValueError, match=f"^family is 'hopper': .*{text}$"):
        resolved("hopper")
    assert message.startswith(refusal().removeprefix("family is 'hopper': "))
    assert said(many) == [] == said(lambda: resolved("triton"))


def refusal(**asked: object) -> str:
    with pytest.raises(ValueError) as caught:
        resolved("hopper", **asked)
    return str(caught.value)


def test_an_amd_gpu_runs_plain_torch(machine: Machine) -> None:
    machine.hip()
    assert resolved() == "torch"
    assert "an AMD GPU" in refusal()


def test_the_warning_does_not_break_a_compiled_layer(machine: Machine) -> None:
    """`torch.compile(fullgraph=True)` traces the choice of a family, and cannot trace a warning."""
    machine.capability(8, 0)
    torch._dynamo.reset()
    call = torch.compile(lambda x: x + (resolved() == "triton"), fullgraph=True, backend="eager")
    assert call(torch.zeros(3)).tolist() == [1, 1, 1]


# --- family="hopper"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"dtype": FP32}, "dtype is torch.float32; the hopper family runs bf16 and fp16"),
        ({"dtype": FP64}, "dtype is torch.float64; the hopper family runs bf16 and fp16"),
        ({"n": 250}, "n is 250; the hopper family takes multiples of 8"),
        ({"d": 1025}, "d is 1025; the hopper family takes multiples of 8"),
        ({"device": CPU}, "device is cpu; the hopper family needs a GPU, and has no interpreter"),
    ],
    ids=str,
)
def test_what_hopper_cannot_run_is_refused(machine: Machine, asked: dict, text: str) -> None:
    assert refusal(**asked) == f"family is 'hopper': {text}"


def test_a_layer_on_the_cpu_refuses_hopper() -> None:
    """Also in the interpreter, in which the tests run."""
    x, w1, w2 = torch.zeros(4, 16, dtype=BF16), torch.zeros(2, 32, 16, dtype=BF16), torch.zeros(2, 16, 16, dtype=BF16)
    ids, scores = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    for asked in ({"family": "hopper"}, {"choices": layer.Choices("hopper")}):
        with pytest.raises(ValueError, match="family is 'hopper': device is cpu; the hopper family needs a GPU"):
            layer.experts(x, ids, scores, w1, w2, **asked)


# --- a point that asks for it


def test_a_command_line_that_asks_for_hopper_on_a_cpu_gives_unsupported_rows() -> None:
    points = config.load(["sweeps=custom", "shape=tiny", "dtype=bf16,fp32", "knobs.family=hopper"]).points
    assert [p.knobs.family for p in points] == ["hopper"] * 2
    for p in points:
        outcome = serve_point(p, Settings(samples=1, warmup_ms=0.0)).outcome
        assert outcome.status == "unsupported"
        assert outcome.reason.startswith("family is 'hopper': device is cpu; the hopper family needs a GPU")


def test_the_adapter_names_what_hopper_cannot_run(machine: Machine) -> None:
    sizes = {"T": 16, "d": 64, "n": 32, "E": 4, "K": 2}

    def reason(dtype: str = "bf16", **shape: int) -> str | None:
        spec = ShapeSpec(**(sizes | shape))
        return Impl.supports(
            Point(sweep="test", impl="sonic", dtype=dtype, shape=spec, knobs=Knobs(family="hopper")), CARD
        )

    assert reason() is None
    assert reason("fp32").startswith("family is 'hopper': dtype is torch.float32")
    assert reason(n=36) == "family is 'hopper': n is 36; the hopper family takes multiples of 8"
