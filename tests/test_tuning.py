"""Which tile a kernel runs with: committed and own choices, the three modes, measuring, and keys."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from sonic.kernels import tuning
from sonic.kernels.common import HopperTile, Tile, capped, check_fits, tile_of
from tests.oracle import GEMMS

BF16 = torch.bfloat16
FAST, SLOW, HUGE = Tile(128, 128, 64), Tile(64, 64, 64), Tile(256, 256, 128, stages=5)


class Card:
    """A made-up card: what was run on it, and how long each tile takes, ms."""

    def __init__(self) -> None:
        self.runs: list[Tile] = []
        self.times = {FAST: 1.0, SLOW: 2.0}

    def run(self, tile: Tile) -> None:
        check_fits(tile, 2)
        self.runs.append(tile)

    def choose(self, candidates: list[Tile] | None = None, kernel: str = "up_proj", d: int = 1536) -> Tile:
        return tuning.choose(kernel, d, 256, 128, BF16, lambda: candidates or [SLOW, HUGE, FAST], self.run)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Card]:
    """A card `test-card` with empty committed and own folders and a clock that reads `Card.times`."""
    made = Card()

    def do_bench(call, **_: object) -> float:
        call()
        return made.times[made.runs[-1]]

    monkeypatch.setattr(tuning, "_card", lambda: "test-card")
    monkeypatch.setattr(tuning, "_COMMITTED", tmp_path / "committed")
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "tune_seconds", 0.0)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setenv("SONIC_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("SONIC_TUNE", raising=False)
    (tmp_path / "committed").mkdir()
    tuning._known.cache_clear()
    yield made
    tuning._known.cache_clear()


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a process remembers."""
    monkeypatch.setattr(tuning, "_chosen", {})
    tuning._known.cache_clear()


def commit(tmp_path: Path, tile: Tile, kernel: str = "up_proj") -> None:
    key = tuning.entry(kernel, 1536, 256, 128, BF16)
    (tmp_path / "committed" / "test-card.json").write_text(json.dumps({key: dataclasses.asdict(tile)}))


def test_without_a_card_the_first_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_card", lambda: None)
    monkeypatch.setenv("SONIC_TUNE", "full")
    assert Card().choose() == SLOW
    assert not tuning.measured("up_proj", 1536, 256, 128, BF16)


@pytest.mark.parametrize("mode", ["cached", "off"])
def test_nothing_is_measured_unless_asked(card: Card, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("SONIC_TUNE", mode)
    assert card.choose() == SLOW and card.runs == []
    assert not tuning.user_file("test-card").exists()


def test_a_committed_choice_is_taken(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, FAST)
    assert tuning.known("up_proj", 1536, 256, 128, BF16) == FAST
    assert card.choose() == FAST and card.choose(kernel="d_act") == SLOW and card.choose(d=4096) == SLOW
    assert tuning.measured("up_proj", 1536, 256, 128, BF16) and not tuning.measured("d_act", 1536, 256, 128, BF16)
    new_process(monkeypatch)
    monkeypatch.setenv("SONIC_TUNE", "off")
    assert card.choose() == SLOW


def test_full_measures_once_and_keeps_the_fastest(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that does not fit the card is passed over; a second process tunes nothing."""
    monkeypatch.setenv("SONIC_TUNE", "full")
    assert card.choose() == FAST
    assert HUGE not in card.runs and tuning.tune_seconds > 0
    stored = json.loads(tuning.user_file("test-card").read_text())
    assert {key: Tile(**fields) for key, fields in stored.items()} == {
        tuning.entry("up_proj", 1536, 256, 128, BF16): FAST
    }
    card.runs.clear()
    new_process(monkeypatch)
    assert card.choose() == FAST and card.runs == []


def test_ones_own_choice_wins_over_a_committed_one(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_TUNE", "full")
    card.choose()
    commit(tmp_path, SLOW)
    new_process(monkeypatch)
    assert card.choose() == FAST


def test_choices_of_other_kernels_stay_in_the_file(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_TUNE", "full")
    for kernel in GEMMS:
        card.choose(kernel=kernel)
    assert len(json.loads(tuning.user_file("test-card").read_text())) == len(GEMMS)
    assert not list(tuning.user_file("test-card").parent.glob("*.partial"))


def test_no_candidate_fits(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_TUNE", "full")
    with pytest.raises(RuntimeError, match="none of the 1 candidate tiles fits this card"):
        card.choose([HUGE])


def test_an_unknown_mode_is_named(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_TUNE", "always")
    with pytest.raises(ValueError, match="SONIC_TUNE is 'always'; allowed: cached, full, off"):
        card.choose()


def test_a_key_holds_sizes_and_triton_but_no_tokens() -> None:
    assert (
        tuning.entry("d_act", 1536, 256, 128, BF16) == f"d_act d=1536 n=256 E=128 bfloat16 triton={triton.__version__}"
    )


def test_slugs() -> None:
    assert tuning.gpu_slug("NVIDIA H200") == "nvidia-h200"
    assert tuning.gpu_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_capped_tiles_are_no_wider_than_the_columns() -> None:
    tiles = [Tile(n=256, split=8), Tile(n=256, split=2, flatten=True), Tile(n=64)]
    assert capped(tiles, 1000) == tiles
    assert [(t.n, t.split) for t in capped(tiles, 40)] == [(64, 2), (64, 2), (64, 1)]
    assert {t.n for t in capped(tiles, 3)} == {16}
    assert len(capped([Tile(n=256), Tile(n=128)], 64)) == 1


def test_a_ring_that_fits_exactly() -> None:
    check_fits(Tile(128, 128, 64, stages=7), 2)
    with pytest.raises(OutOfResources) as caught:
        check_fits(Tile(128, 128, 64, stages=8), 2)
    assert "262144" in str(caught.value) and "232448" in str(caught.value)


def test_a_file_holds_tiles_of_both_kinds(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, pingpong = HopperTile(stages=3, buffers=3), HopperTile(128, 128, schedule="pingpong")
    card.times |= {wide: 1.0, pingpong: 0.5}
    commit(tmp_path, wide, "hopper.up_proj")
    assert card.choose(kernel="hopper.up_proj") == wide == tuning.known("hopper.up_proj", 1536, 256, 128, BF16)
    monkeypatch.setenv("SONIC_TUNE", "full")
    assert card.choose() == FAST and card.choose([wide, pingpong], kernel="hopper.d_act") == pingpong
    new_process(monkeypatch)
    found = {kernel: card.choose(kernel=kernel) for kernel in ("up_proj", "hopper.up_proj", "hopper.d_act")}
    assert found == {"up_proj": FAST, "hopper.up_proj": wide, "hopper.d_act": pingpong}
    assert [type(tile) for tile in found.values()] == [Tile, HopperTile, HopperTile]


def test_committed_choices_are_tiles() -> None:
    """Every file under `tuned/` names a card, known kernels and valid tiles of the kernel's family."""
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        assert path.stem == tuning.gpu_slug(path.stem)
        for key, fields in json.loads(path.read_text()).items():
            family, _, kernel = key.split()[0].rpartition(".")
            assert family in ("", "hopper") and kernel in (*GEMMS, "d_act_gemm"), key
            tile = tile_of(fields)
            assert Tile().override(**tile.sizes()).sizes() == tile.sizes()
            assert tile.split & (tile.split - 1) == 0 and tile.n // tile.split >= 8 and tile.store in ("tma", "pointer")
            assert isinstance(tile, HopperTile) == (family == "hopper"), key
