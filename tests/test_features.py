"""The feature matrix: that it is whole and where it should be, and that what adapters declare is what runs and is kept,
as far as a CPU and the committed rows can tell."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from analysis import load, paper
from sonic import features, impls, measure
from sonic.impls._common import Properties
from sonic.shapes import Shape
from tests.impls.test_adapters import CPU, point, problem_of
from tests.oracle import steps_replaced
from tests.test_imports import top

ROOT = Path(__file__).parents[1]
DECLARED = features.declared()
STYLES = sorted(name for name in DECLARED if name.endswith("_style"))
#: What our kernels keep of indices and scores per (token, expert) pair, and plain torch, whose indices are int64.
PAIR_BYTES = {"triton": 16, "torch": 24}
#: These keep their routing dense, one int32 and one fp32 per token and expert.
DENSE = ("momoe", "momoe_save_all")


def adapter(name: str, op: str = "experts", family: str = "auto"):
    p = point(name, op, "learned" if op == "layer" else "zipf", (32, 64, 32, 6, 3))
    p = p.model_copy(update={"knobs": p.knobs.model_copy(update={"family": family})})
    return impls.load(name)(problem_of(p), p)


# The table


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs" / "baselines.md").read_text()
    (table,) = re.findall(r"<!-- features -->\n(.*?)\n<!-- /features -->", text, re.DOTALL)
    assert table == features.markdown(), "put in what python -m sonic.features --markdown prints"


def test_every_implementation_is_in_the_table_or_tells_why_not() -> None:
    assert sorted([*DECLARED, *features.undeclared()]) == impls.names()
    assert set(features.PAPER_NAME) <= set(DECLARED)
    assert all(reason != "nothing is declared" for reason in features.undeclared().values())
    kinds = get_type_hints(Properties)
    assert list(features.FEATURES) == [name for name in kinds if kinds[name] == bool | None]


def test_the_command_needs_and_imports_no_package() -> None:
    """In a process where nothing can be imported that an adapter names beside torch and the standard library."""
    named = set().union(*map(top, (ROOT / "sonic" / "impls").glob("*.py")))
    packages = named - {"sonic", "torch", *sys.stdlib_module_names}
    assert {"transformers", "scattermoe", "megatron", "deep_gemm"} <= packages
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
        "from sonic import features; sys.exit(features.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "megablocks, the paper: no; mlp_impl=grouped" in done.stdout
    assert "torch_grouped_mm_compiled  Inductor decides" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_differences_from_the_paper_are_those_with_a_note() -> None:
    table = paper.features().set_index(["method", "feature"]).value
    differ = {
        (name, feature): table[method, feature]
        for name, method in features.PAPER_NAME.items()
        for feature in features.FEATURES
        if getattr(DECLARED[name], feature) is not table[method, feature]
    }
    noted = {(found.impl, feature): found.paper for found in features.DIFFERENCES for feature in found.features}
    assert noted == differ


# What is declared


@pytest.mark.parametrize("name", DECLARED)
def test_a_declaration_does_not_contradict_itself(name: str) -> None:
    found = DECLARED[name]
    assert found.no_padding == (found.padding == 1)
    assert not (found.gather_fused_forward and "Xe" in found.kept)
    assert not (found.d_act_whole and not found.d_activation_fused)


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, family) for name in ("sonic", *STYLES) for family in ("triton", "torch")]
    + [("torch_grouped_mm", None), ("torch_loop", None)],
)
def test_held_bytes_are_the_declared_matrices_and_little_else(name: str, family: str | None) -> None:
    """As a row records them: the matrices, padding with them, indices and scores of each row, and E offsets."""
    impl = adapter(name, family=family or "auto")
    shape, block = impl.problem.shape, impl.properties.padding
    rows = int(((impl.problem.counts_E + block - 1) // block * block).sum())
    declared = impl.properties.held_bytes(shape, 2, rows)
    work = measure.Work(impl.forward, None, impl.zero_grad)
    held = measure.memory(work, CPU, impl.x_Td, impl.weights(), training=True).held_bytes
    pairs = shape.R if block == 1 else shape.R + rows
    assert declared <= held <= declared + PAIR_BYTES["triton" if family else "torch"] * pairs + 8 * (shape.E + 1)


@pytest.mark.parametrize("name", ["sonic", *STYLES])
def test_steps_that_run_are_those_that_are_declared(name: str) -> None:
    """A layer's forward and backward: a copy of gathered rows, an activation or a top-K of its own is a step."""
    ran: list[set[str]] = [set()]

    def noted(step_name, step):
        def wrapped(*args, **kwargs):
            ran[-1].add(step_name)
            return step(*args, **kwargs)

        return wrapped

    impl = adapter(name, "layer", "triton")
    with steps_replaced(noted):
        out = impl.forward()
        ran.append(set())
        out.backward(impl.problem.do_Td)
    forward, backward = ran
    found = {
        "gather_fused_forward": "gather_rows" not in forward,
        "gather_fused_backward": "gather_rows" not in backward,
        "activation_fused": "swiglu" not in forward,
        "d_activation_fused": "d_swiglu" not in backward,
        "efficient_topk": "router_topk" in forward,
    }
    declared = dataclasses.asdict(impl.properties)
    assert found == {feature: declared[feature] for feature in found}
    assert ("up_proj" in backward) == ("H" not in impl.properties.kept)
    assert ("down_proj" in backward) == (not declared["ds_from_da"] and "Y" not in impl.properties.kept)


def test_rows_of_a_gpu_hold_what_is_declared() -> None:
    """Within 5%, in which indices and scores are; where rows are padded, by any number up to the multiple."""
    table, _ = load.rows(gpu="nvidia-h200")
    table = table[table.held_bytes.notna() & table.op.isin(("layer", "experts")) & table.impl.isin(DECLARED)]
    assert {"sonic", "scattermoe", "sonicmoe_official"} <= set(table.impl)
    wrong = []
    for row in table.itertuples():
        found, shape = DECLARED[row.impl], Shape(row.T, row.d, row.n, row.E, row.K)
        most = found.held_bytes(shape, 2, row.R + shape.E * (found.padding - 1))
        most += 8 * shape.T * shape.E if row.impl in DENSE else 0
        if not found.held_bytes(shape, 2, row.R) <= row.held_bytes <= 1.05 * most:
            wrong.append(f"{row.impl} {row.sweep} {shape}: {row.held_bytes:.0f} bytes, declared {most}")
    assert set(table.dtype) <= {"bf16", "fp16"} and not wrong, "\n".join(wrong)
