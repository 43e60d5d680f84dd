"""`python -m sonic.features`: the feature matrix (the paper's Table 2) of all implementations, as adapters declare it.

Rows are features, columns are implementations: those that the paper has, then the others. A cell that the paper has
otherwise bears the number of a note, which tells the paper's value and why ours is another. Declarations are all that
is read, so no implementation's package needs to be there, and none is imported.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sonic import impls
from sonic.say import say

if TYPE_CHECKING:
    from sonic.impls._common import Properties

#: Field of `Properties` -> the feature in the paper's words, in the order of its Table 2.
FEATURES = {
    "gather_fused_forward": "gather fused in load, forward",
    "gather_fused_backward": "gather fused in load, backward",
    "activation_fused": "SwiGLU in epilogue",
    "d_activation_fused": "dSwiGLU in epilogue",
    "ds_from_da": "dS = <dA', A>",
    "d_act_whole": "dH and dS in one epilogue",
    "io_overlapped": "MMA and epilogue IO overlapped",
    "no_scatter_kernel": "no separate scatter kernel",
    "efficient_topk": "efficient top-K",
    "no_padding": "no padding outside GEMM tiles",
}

#: Implementation -> its name in the paper's Table 2.
PAPER_NAME = {
    "sonic": "SonicMoE",
    "sonicmoe_official": "SonicMoE",
    "scattermoe": "ScatterMoE",
    "momoe": "MoMoE",
    "momoe_save_all": "MoMoE",
    "megablocks": "MegaBlocks",
    "megatron": "Megatron",
    "deepgemm_pt": "DeepGEMM",
    "deepgemm_pp": "DeepGEMM",
}


class Difference(NamedTuple):
    """Features of one implementation that the paper has otherwise, what it says of them, and why they are not that."""

    impl: str
    features: tuple[str, ...]
    paper: bool | None
    reason: str


#: Every cell that differs from `analysis.paper.features`, repeated because the harness does not import the analysis; a
#: test holds it against both.
DIFFERENCES = (
    Difference(
        "megablocks",
        ("no_padding",),
        False,
        "mlp_impl=grouped pads no rows; mlp_impl=sparse, which pads them to 128, refuses triton 3.2 and newer",
    ),
    Difference(
        "megatron",
        ("activation_fused", "d_activation_fused"),
        True,
        "in 0.16.1 SwiGLU times the score is one compiled function between the GEMMs; the paper read 610a75e",
    ),
    Difference(
        "megatron", ("no_scatter_kernel",), None, "unpermute adds rows to their tokens in a kernel, scatter_add_"
    ),
    Difference(
        "megatron", ("no_padding",), False, "in 0.16.1 permute pads no rows, and cuBLAS per expert needs no multiple"
    ),
    Difference(
        "deepgemm_pp",
        ("no_scatter_kernel", "efficient_topk"),
        None,
        "the paper's column is the GEMM alone; around it are our top-K and our gather-and-sum",
    ),
)

_CAPTION = (
    "A dash: does not apply. [1]: the paper has it otherwise, see below. `sonic` is its Hopper kernels with all knobs "
    "at rest; in the Triton kernels what overlaps is up to Triton. Kept are gathered Xe (R, d), H (R, 2n), A (R, n) "
    "and Y (R, d) of R rows; 2A and 2Y: another matrix as wide."
)
_WORDS = {True: "yes", False: "no", None: "-"}
#: Characters of one table, which is cut between implementations.
_WIDTH = 120
_GAP = "  "


def declared() -> dict[str, Properties]:
    """What every implementation declares, the paper's first and in its order, without those that declare nothing."""
    found = {name: impls.load(name).properties for name in (*PAPER_NAME, *_others())}
    return {name: properties for name, properties in found.items() if properties is not None}


def undeclared() -> dict[str, str]:
    """Implementations that declare nothing, each with the reason."""
    loaded = {name: impls.load(name) for name in _others()}
    return {name: loaded[name].undeclared for name in loaded if loaded[name].properties is None}


def _others() -> list[str]:
    return [name for name in impls.names() if name not in PAPER_NAME]


def _columns() -> list[list[str]]:
    """The features' names, then one column for each implementation, all from top to bottom."""
    columns = [["feature", "in the paper", *FEATURES.values(), "kept beside X", "rows per expert, multiple of"]]
    for name, properties in declared().items():
        cells = [_WORDS[getattr(properties, feature)] + _mark(name, feature) for feature in FEATURES]
        columns.append([name, PAPER_NAME.get(name, "-"), *cells, _kept(properties), str(properties.padding)])
    return columns


def _mark(name: str, feature: str) -> str:
    """The number of the note on a cell, or nothing."""
    numbers = (i for i, found in enumerate(DIFFERENCES, 1) if found.impl == name and feature in found.features)
    return "".join(f" [{number}]" for number in numbers)


def _kept(properties: Properties) -> str:
    """Matrices by name, with their number where it is not one."""
    counts = {name: properties.kept.count(name) for name in properties.kept}
    return " ".join(f"{count if count > 1 else ''}{name}" for name, count in counts.items()) or "nothing"


def _tables() -> Iterator[list[list[str]]]:
    """Tables of at most `_WIDTH` characters, as columns: the features' names with as many implementations as fit."""
    names, *columns = _columns()
    table, room = [names], _WIDTH - _width(names)
    for column in columns:
        if room < _width(column) + len(_GAP):
            yield table
            table, room = [names], _WIDTH - _width(names)
        table.append(column)
        room -= _width(column) + len(_GAP)
    yield table


def _width(column: list[str]) -> int:
    return max(map(len, column))


def plain() -> str:
    """The matrix for a terminal."""
    parts = []
    for table in _tables():
        padded = [[cell.ljust(_width(column)) for cell in column] for column in table]
        parts.append("\n".join(_GAP.join(line).rstrip() for line in zip(*padded, strict=True)))
    width = max(map(len, undeclared()))
    parts += [_wrapped(_CAPTION), "\n".join(map(_wrapped, _notes())), "Not declared:"]
    parts.append("\n".join(f"{_GAP}{name:<{width}}{_GAP}{reason}" for name, reason in undeclared().items()))
    return "\n\n".join(parts)


def markdown() -> str:
    """The matrix for docs/baselines.md."""
    parts = []
    for table in _tables():
        (names, *rows), *columns = table
        heads = [names, *(f"`{column[0]}`" for column in columns)]
        lines = [f"| {' | '.join(line)} |" for line in (heads, *zip(rows, *(c[1:] for c in columns), strict=True))]
        parts.append("\n".join([lines[0], "|---" * len(table) + "|", *lines[1:]]))
    parts += [_wrapped(_CAPTION), "\n".join(_wrapped(f"- {note}", "  ") for note in _notes())]
    parts.append("Not declared:\n\n" + "\n".join(f"- `{name}`: {reason}" for name, reason in undeclared().items()))
    return "\n\n".join(parts)


def _wrapped(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent if text[0] in "[-" else "")


def _notes() -> list[str]:
    return [
        f"[{i}] {found.impl}, the paper: {_WORDS[found.paper]}; {found.reason}"
        for i, found in enumerate(DIFFERENCES, 1)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sonic.features", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--markdown", action="store_true", help="the table as docs/baselines.md has it")
    say(markdown() if parser.parse_args(arguments).markdown else plain())
    return 0


if __name__ == "__main__":
    sys.exit(main())
