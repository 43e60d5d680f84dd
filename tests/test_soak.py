"""The soak itself: a case that hangs, dies or is wrong is named, and the cases after it still run."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import soak_hopper

CHILD = """
import json, os, sys, time
for case in map(int, sys.argv[1].split(",")):
    print(json.dumps([case, "begin", ""]), flush=True)
    if case == 2:
        time.sleep(60)
    if case == 4:
        print("no luck", file=sys.stderr); sys.stderr.flush(); os._exit(3)
    print(json.dumps([case, "wrong" if case == 5 else "ok", "off by one" if case == 5 else ""]), flush=True)
"""


def test_every_case_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    counts = soak_hopper.soak(range(9), 2, [sys.executable, "-S", "-E", "-c", CHILD], timeout=2.0)
    assert counts == {"ok": 6, "wrong": 1, "hung": 1, "crashed": 1}
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "crashed: case 4: exit code 3: no luck",
        "hung: case 2: no answer in 2 s",
        "wrong: case 5: off by one",
    ]


def test_a_case_against_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch family passes; one wrong row of dW2 does not."""
    soak_hopper.run(12, "torch", "cpu")
    experts = soak_hopper.layer.experts

    class OffByOneRow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w2):
            return w2.clone()

        @staticmethod
        def backward(ctx, dw2):
            return torch.cat([dw2[:, :1] * 2, dw2[:, 1:]], dim=1)

    def wrong(x, ids, scores, w1, w2, **options):
        return experts(x, ids, scores, w1, OffByOneRow.apply(w2) if x.dtype != torch.float32 else w2, **options)

    monkeypatch.setattr(soak_hopper.layer, "experts", wrong)
    with pytest.raises(AssertionError, match=r"case 12: .*dw2\[\d+\] is off by"):
        soak_hopper.run(12, "torch", "cpu")


@pytest.mark.parametrize("E", [1, 5, 64])
@pytest.mark.parametrize("routing", soak_hopper.ROUTINGS)
def test_routings(routing: str, E: int) -> None:
    ids = soak_hopper.ids_of(routing, 50, E, min(E, 4), torch.Generator().manual_seed(0))
    assert ids.shape == (50, min(E, 4)) and ids.min() >= 0 and ids.max() < E
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    used = len(ids.unique())
    assert routing != "one" or used == min(E, 4)
    assert routing != "empty" or used <= 4 + E // 8


def test_without_a_card_there_is_nothing_to_soak() -> None:
    assert soak_hopper.refusal("torch", "cpu") is None
    assert soak_hopper.refusal("hopper", "cpu").startswith("family is 'hopper': device is cpu")


def test_ds_is_measured_by_what_its_sums_are_made_of() -> None:
    """A sum that cancels may be as wrong as any other; a usual one that is off by a hundredth is wrong."""
    want = torch.full((65, 1), 5.0)
    want[64] = 0.01
    off = torch.zeros_like(want)
    off[64] = 0.005
    soak_hopper.check_ds("", want + off, want, 64, torch.float16)
    off[64] = 0.05
    with pytest.raises(AssertionError, match=r"ds\[1\] is off by"):
        soak_hopper.check_ds("", want + off, want, 64, torch.float16)
    with pytest.raises(AssertionError, match=r"ds\[0\] is off by nan"):
        soak_hopper.check_ds("", want * float("nan"), want, 64, torch.float16)
