"""The numbers of SonicMoE (arXiv 2512.14080) as data, and its memory, IO and padding models as functions.

Figure and table numbers are those of version 1 of the paper; `source` of every number says where it was read. `kind`
says how:

- `stated`: printed in the paper (text, table or caption) or on the authors' page,
- `digitised`: read from the pixels of a figure, within 2 TFLOPS and 0.02 GiB,
- `reported`: totals of Fig 6 from a third party's digest; they agree with the ratios in the paper's text,
- `derived`: arithmetic on the above, done here.

A number that was not found is absent from the tables, never zero. Times, TFLOPS and memory are of bf16 layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from sonic.shapes import Shape

GIB = 2**30

#: Name in the paper -> name of the implementation here.
METHODS = {
    "SonicMoE": "sonic",
    "ScatterMoE": "scattermoe",
    "MegaBlocks": "megablocks",
    "MoMoE": "momoe_save_all",  # its bars of memory hold H and Y
    "Megatron": "megatron",
    "DeepGEMM-pt": "deepgemm_pt",
    "DeepGEMM++": "deepgemm_pp",
    "upper bound": "cublas_bmm",
    "triton example": "triton_kernels",
    "DeepGEMM": "deepgemm_pp",
    "DeepGEMM, B300": "deepgemm",  # neither -pt nor ++, and nothing here
}

#: The authors' own package, behind the paper's bars -> the implementation that they stand beside.
AUTHORS = {"sonicmoe_official": "sonic"}

#: Model size -> (T, d); Table 9.
SIZES = {"1.4B": (40960, 768), "7B": (24576, 1536), "30B": (32768, 4096), "120B": (32768, 4096)}

#: Model size -> (n, E, K) from coarse to fine experts; Table 9b, and the 13th shape, which only Fig 1 has.
CONFIGS = {
    "1.4B": ((1024, 32, 2), (512, 64, 4), (256, 128, 8)),
    "7B": ((1024, 32, 2), (512, 64, 4), (256, 128, 8)),
    "30B": ((2048, 32, 2), (1024, 64, 4), (512, 128, 8), (256, 256, 16)),
    "120B": ((2048, 64, 4), (1024, 128, 8), (512, 256, 16)),
}

#: The finer experts that Fig 3 adds; Table 9a.
FIG3_CONFIGS = {
    "1.4B": ((128, 256, 16), (64, 512, 32)),
    "7B": ((128, 256, 16), (64, 512, 32)),
    "30B": ((128, 512, 32), (64, 1024, 64)),
    "120B": ((256, 512, 32), (128, 1024, 64)),
}

#: Panels of Fig 16: (d, n, K) and the E of its four points; T = 16384, tile 128.
FIG16_T = 16384
FIG16_PANELS = (
    (1536, 256, 8, (64, 128, 256, 512)),
    (1536, 1024, 2, (16, 32, 64, 128)),
    (4096, 512, 8, (64, 128, 256, 512)),
    (4096, 1024, 4, (32, 64, 128, 256)),
)

#: What figures of open models say of their tokens.
MODEL_T = "The paper does not print T of its H100 figures; here it is that of its B300 figure."
#: Models of Figs 15 and 17: (T, d, n, E, K). T is that of the B300 figure.
MODEL_SHAPES = {
    "OLMoE-1B-7B-0125": (32768, 2048, 1024, 64, 8),
    "gpt-oss-20b": (32768, 2880, 2880, 64, 4),  # E as the figure prints it; the published model has 32 experts
    "Kimi-Linear-48B-A3B-Base": (32768, 2304, 1024, 256, 8),
    "Qwen3-Next-80B-A3B-Thinking": (32768, 2048, 512, 512, 10),
    "Qwen3-235B-A22B-Thinking-2507": (32768, 4096, 1536, 128, 8),
    "DeepSeek-V3.2-Exp": (32768, 7168, 2048, 256, 8),
}

_OPEN_MODELS = (  # name, date (year-month), parameters, K, E, d, n
    ("Mixtral 8x22B", "2023-11", "131B", 2, 8, 6144, 16384),
    ("DBRX", "2024-03", "132B", 4, 16, 6144, 10752),
    ("Phi-3.5-MoE", "2024-09", "42B", 2, 16, 4096, 6400),
    ("OLMoE", "2024-09", "7B", 8, 64, 2048, 1024),
    ("Granite 3.1-MoE", "2024-12", "3B", 8, 40, 1536, 512),
    ("DeepSeek-V3", "2024-12", "671B", 8, 256, 7168, 2048),
    ("Qwen3 MoE", "2025-04", "235B", 8, 128, 4096, 1536),  # version 1 misprints d as 2048
    ("Qwen3-30B-A3B", "2025-05", "30.5B", 8, 128, 2048, 768),
    ("Kimi K2", "2025-07", "1.04T", 8, 384, 7168, 2048),
    ("gpt-oss-120b", "2025-08", "120B", 4, 128, 2880, 2880),
    ("GLM-4.5-Air", "2025-08", "106B", 8, 128, 4096, 1408),
    ("Qwen3-Next-80B-A3B-Instruct", "2025-09", "81B", 10, 512, 2048, 512),
    ("DeepSeek-V3.2-Exp", "2025-10", "685B", 8, 256, 7168, 2048),
)

# Table 2: feature, by its name in `sonic.features`, -> yes, no or not applicable, in the order of _TABLE2_METHODS. The
# paper has one row for both passes of the gather and one for SwiGLU and its gradient.
_TABLE2_METHODS = ("SonicMoE", "ScatterMoE", "MoMoE", "MegaBlocks", "Megatron", "DeepGEMM")
_TABLE2 = {
    "gather_fused_forward": (True, True, True, False, False, False),
    "gather_fused_backward": (True, False, False, False, False, False),
    "activation_fused": (True, False, True, False, True, None),
    "d_activation_fused": (True, False, True, False, True, None),
    "ds_from_da": (True, False, False, False, True, None),
    "d_act_whole": (True, False, False, False, False, None),
    "io_overlapped": (True, False, False, False, False, False),
    "no_scatter_kernel": (True, True, True, False, None, None),
    "efficient_topk": (True, False, False, False, False, None),
    "no_padding": (True, True, True, False, False, False),
}

# Fig 1, right and left panel: n -> (SonicMoE, ScatterMoE, MoMoE[, upper bound]).
_FIG1_FWD = {
    "H100": {
        2048: (585, 351, 437, 642),
        1024: (553, 369, 412, 633),
        512: (503, 325, 348, 577),
        256: (429, 262, 243, 499),
    },
    "B300": {
        2048: (1087, 580, 570, 1265),
        1024: (1099, 516, 455, 1219),
        512: (988, 503, 327, 1110),
        256: (800, 423, 198, 925),
    },
}
_FIG1_MEMORY = {2048: (2.50, 3.0, 2.75), 1024: (2.50, 3.5, 3.25), 512: (2.50, 4.5, 4.25), 256: (2.50, 6.5, 6.25)}

_SEVEN = ("SonicMoE", "ScatterMoE", "MegaBlocks", "MoMoE", "Megatron", "DeepGEMM-pt", "DeepGEMM++")

# Fig 13: (size, n) -> peak memory in GiB, in the order of _SEVEN. The bars include the expert weights.
_FIG13 = {
    ("1.4B", 256): (0.57, 1.14, 1.42, 0.99, 1.60, 1.00, 1.00),
    ("1.4B", 512): (0.57, 0.90, 0.94, 0.75, 1.13, 0.76, 0.76),
    ("1.4B", 1024): (0.57, 0.78, 0.70, 0.62, 0.90, 0.64, 0.64),
    ("7B", 256): (0.61, 1.19, 1.64, 1.10, 1.76, 1.14, 1.14),
    ("7B", 512): (0.61, 0.91, 1.06, 0.82, 1.19, 0.84, 0.84),
    ("7B", 1024): (0.61, 0.77, 0.76, 0.68, 0.91, 0.69, 0.69),
    ("30B", 256): (2.49, 6.47, None, 6.26, 12.48, 6.38, 6.38),
    ("30B", 512): (2.49, 4.48, 6.10, 4.23, 6.47, 4.31, 4.31),
    ("30B", 1024): (2.48, 3.48, 4.06, 3.23, 4.48, 3.28, 3.30),
    ("120B", 512): (4.48, 8.72, None, 8.26, 12.73, 8.39, 8.41),
    ("120B", 1024): (4.48, 6.72, 9.13, 6.23, 8.74, 6.34, 6.34),
    ("120B", 2048): (4.48, 5.72, 6.06, 5.23, 6.72, 5.31, 5.31),
}

# Fig 14: (size, n) -> forward and backward TFLOPS, in the order of _SEVEN.
_FIG14 = {
    ("1.4B", 256): ((339, 183, 132, 151, 107, 137, 237), (366, 206, 166, 167, 140, 218, 279)),
    ("1.4B", 512): ((399, 205, 163, 208, 145, 199, 314), (405, 245, 224, 227, 162, 287, 326)),
    ("1.4B", 1024): ((406, 237, 185, 237, 177, 223, 370), (437, 271, 258, 257, 191, 301, 346)),
    ("7B", 256): ((366, 208, 148, 193, 121, 154, 259), (407, 213, 180, 185, 133, 231, 276)),
    ("7B", 512): ((435, 235, 191, 263, 168, 239, 353), (441, 249, 239, 245, 181, 301, 322)),
    ("7B", 1024): ((468, 266, 217, 307, 209, 265, 415), (468, 281, 292, 283, 216, 320, 345)),
    ("30B", 256): ((429, 262, None, 243, 151, 176, 279), (460, 238, None, 197, 133, 256, 328)),
    ("30B", 512): ((503, 325, 252, 348, 227, 325, 424), (512, 305, 272, 276, 217, 349, 381)),
    ("30B", 1024): ((553, 369, 316, 412, 292, 472, 508), (555, 342, 331, 319, 267, 395, 409)),
    ("120B", 512): ((518, 336, None, 340, 225, 295, 429), (527, 316, None, 267, 203, 335, 398)),
    ("120B", 1024): ((560, 383, 324, 424, 287, 436, 518), (569, 353, 333, 337, 275, 398, 422)),
    ("120B", 2048): ((597, 386, 366, 466, 341, 548, 574), (587, 370, 385, 368, 316, 420, 445)),
}

# Fig 6, totals in ms at 7B n=256 (24576, 1536, 256, 128, 8): method -> (forward, backward).
_FIG6 = {
    "SonicMoE": (1.237, 2.173),
    "DeepGEMM++": (1.770, 3.303),
    "ScatterMoE": (2.255, 3.968),
    "MoMoE": (2.347, 4.678),
    "MegaBlocks": (2.983, None),
    "Megatron": (3.476, None),
}

# Fig 6, single kernels named in the text of section 6: method, kernel, ms, TFLOPS, TB/s.
_FIG6_KERNELS = (
    ("SonicMoE", "up_proj", 0.55, 559, None),  # with gather and SwiGLU
    ("DeepGEMM++", "up_proj", 0.49, 629, None),
    ("DeepGEMM++", "swiglu", 0.11, None, 2.88),
    ("SonicMoE", "down_proj", None, 485, 2.52),
    ("DeepGEMM++", "down_proj", None, 413, 2.15),
    ("SonicMoE", "d_act", 0.47, 328, 2.14),
    ("ScatterMoE", "d_act", 0.99, None, None),  # the three below together
    ("ScatterMoE", "d_act_gemm", 0.43, 364, None),
    ("ScatterMoE", "ds", 0.24, None, None),
    ("ScatterMoE", "d_swiglu", 0.33, None, None),
    ("DeepGEMM++", "d_act", 0.57, None, None),  # the two below together
    ("DeepGEMM++", "d_act_gemm", 0.32, 480, None),
    ("DeepGEMM++", "d_swiglu", 0.25, None, 2.43),  # with dS and A'
    ("SonicMoE", "d_input", 0.50, 618, None),
    ("MoMoE", "d_input", 1.58, 196, None),
)

# Fig 15's B300 twin: method -> forward and backward TFLOPS in the order of MODEL_SHAPES.
_FIG15_B300 = {
    "SonicMoE": ((1115, 1198, 996, 774, 1139, 1077), (1100, 1133, 1014, 797, 1152, 1072)),
    "ScatterMoE": ((585, 694, 529, 395, 670, 648), (639, 715, 527, 395, 652, None)),
    "MoMoE": ((514, 722, 272, 124, 568, 507), (555, 644, 336, 176, 559, None)),
    "DeepGEMM, B300": ((678, 953, 644, 347, 862, 869), (806, 992, 713, 477, 906, 864)),
    "triton example": ((1014, 1150, 945, None, 1064, 598), (None,) * 6),
}

#: Fig 23, H100: implementation -> TB/s from and to, read off the figure by a third party's eye; of low confidence, so
#: no row of `numbers`.
FIG23_TBPS = {"sonic": (1.5, 2.0), "torch_topk": (0.5, 1.0)}

#: Fig 11 under top-K: (T, d, n, E, K) -> percent of FLOPs wasted, from and to, of the same third party's eye, who does
#: not say whether of model or of padded FLOPs; no row of `numbers` either.
FIG11_WASTED = {(16384, 4096, 1024, 256, 4): (15, 20)}


class KernelGain(NamedTuple):
    """An average over the twelve shapes: how many times as fast a kernel of SonicMoE is as another's.

    `ours` and `theirs` pick rows of `op` by their fields; `theirs` is None where nothing here is that kernel.
    """

    words: str
    op: str
    ours: Mapping[str, str]
    theirs: Mapping[str, str] | None
    times: float


_FUSED, _GIVEN = {"impl": "sonic", "gather": "fused"}, {"impl": "sonic", "gather": "given"}

#: Figs 19 to 21, H100, stated in v1: averages without a shape, so no rows of `numbers`. In Fig 20 a gather is what each
#: method has for it; the gather's own cost is that of SonicMoE's two.
KERNEL_GAINS = {
    "fig19": (
        KernelGain("up over DeepGEMM", "up_proj", _GIVEN, {"impl": "deepgemm_pp", "gather": "given"}, 1.027),
        KernelGain("down over DeepGEMM", "down_proj", {"impl": "sonic"}, {"impl": "deepgemm_pp"}, 1.100),
    ),
    "fig20": (
        KernelGain("M-gather over ScatterMoE", "up_proj", _FUSED, {"impl": "scattermoe", "gather": "fused"}, 1.097),
        KernelGain("M-gather over MoMoE", "up_proj", _FUSED, None, 1.309),
        KernelGain("M-gather over DeepGEMM", "up_proj", _FUSED, {"impl": "deepgemm_pp", "gather": "separate"}, 1.383),
        KernelGain("dW1 over ScatterMoE", "weight_grad_1", _GIVEN, {"impl": "scattermoe", "gather": "given"}, 1.235),
        KernelGain("dW1 over MoMoE", "weight_grad_1", _GIVEN, None, 1.043),
        KernelGain("dW1 over DeepGEMM", "weight_grad_1", _GIVEN, {"impl": "deepgemm_pp", "gather": "given"}, 1.414),
        KernelGain(
            "K-gather over ScatterMoE", "weight_grad_1", _FUSED, {"impl": "scattermoe", "gather": "separate"}, 1.551
        ),
        KernelGain("K-gather over MoMoE", "weight_grad_1", _FUSED, None, 1.424),
        KernelGain(
            "K-gather over DeepGEMM", "weight_grad_1", _FUSED, {"impl": "deepgemm_pp", "gather": "separate"}, 1.718
        ),
    ),
    "fig21": (
        KernelGain("ScatterMoE's torch.bmm", "aggregate", {"impl": "sonic"}, {"impl": "torch_bmm"}, 2.92),
        KernelGain("MoMoE's torch.sum", "aggregate", {"impl": "sonic"}, {"impl": "torch_sum"}, 1.05),
        KernelGain("a Triton sum over contiguous rows", "aggregate", {"impl": "sonic"}, None, 0.98),
    ),
}  # fmt: skip

_HEADLINE = (  # claim, value, unit, shape (T, d, n, E, K) or None, source
    ("fwd+bwd speed over ScatterMoE, 7B n=256, H100", 1.86, "x", (24576, 1536, 256, 128, 8), "abstract"),
    ("activation memory saved against ScatterMoE, 7B n=256", 45, "%", (24576, 1536, 256, 128, 8), "abstract"),
    ("fwd gain over DeepGEMM++, 7B n=256", 43, "%", (24576, 1536, 256, 128, 8), "section 6, Fig 6"),
    ("bwd gain over ScatterMoE, 7B n=256", 83, "%", (24576, 1536, 256, 128, 8), "section 6, Fig 6"),
    ("bwd gain over MoMoE, 7B n=256", 115, "%", (24576, 1536, 256, 128, 8), "section 6, Fig 6"),
    ("share of the cuBLAS bound, 30B fwd, average (86 to 91)", 88, "%", None, "Fig 1"),
    ("memory saved against MoMoE, 120B n=512, at least", 3, "GiB", (32768, 4096, 512, 256, 16), "section 6.1"),
    (
        "token rounding, fwd gain, d=4096 n=1024 K=4 E=256",
        25.7,
        "%",
        (16384, 4096, 1024, 256, 4),
        "section 6.3.3, Fig 16",
    ),
    ("token rounding, bwd gain, same shape", 11.8, "%", (16384, 4096, 1024, 256, 4), "section 6.3.3, Fig 16"),
    ("token rounding, fwd+bwd gain, same shape", 15.9, "%", (16384, 4096, 1024, 256, 4), "section 6.3.3, Fig 16"),
    ("tokens per day, 7B n=256, 64 H100", 213, "billion", None, "abstract"),
    ("tokens per day, ScatterMoE, 96 H100", 225, "billion", None, "abstract"),
)

_COLUMNS = (
    "figure",
    "device",
    "model",
    "T",
    "d",
    "n",
    "E",
    "K",
    "method",
    "impl",
    "quantity",
    "unit",
    "value",
    "kind",
    "source",
)


def shape(size: str, n: int) -> Shape:
    """The shape of a model size of Table 9 with expert width n. KeyError names the size and its widths."""
    if size not in SIZES:
        raise KeyError(f"unknown model size {size!r}; the paper has {', '.join(SIZES)}")
    configs = CONFIGS[size] + FIG3_CONFIGS[size]
    for width, E, K in configs:
        if width == n:
            T, d = SIZES[size]
            return Shape(T, d, n, E, K)
    raise KeyError(f"{size} has no n={n}; the paper has n = {', '.join(str(c[0]) for c in configs)}")


def size_name(T: int, d: int, n: int, E: int, K: int) -> str | None:
    """The paper's name of the model size with this T, d, n*E and n*K (the same at any granularity), or None."""
    for size, (size_T, size_d) in SIZES.items():
        width, experts, active = CONFIGS[size][0]
        if (T, d, n * E, n * K) == (size_T, size_d, width * experts, width * active):
            return size
    return None


def _row(
    figure: str,
    device: str,
    model: str,
    sizes: Iterable[int],
    method: str,
    quantity: str,
    unit: str,
    value: float,
    kind: str,
    source: str,
) -> tuple:
    return (figure, device, model, *sizes, method, METHODS[method], quantity, unit, float(value), kind, source)


def _table(rows: Iterable[tuple]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(_COLUMNS))


def _sizes(shape: Shape) -> tuple[int, int, int, int, int]:
    return shape.T, shape.d, shape.n, shape.E, shape.K


def fig1() -> pd.DataFrame:
    """Fig 1: forward TFLOPS (H100; B300 from version 2) and peak memory in GiB (weights included) of the 30B layer."""
    rows = []
    for device, values in _FIG1_FWD.items():
        source = "v1 Fig 1 right" if device == "H100" else "v2 Fig 1, B300 panel"
        for n, cells in values.items():
            for method, value in zip(("SonicMoE", "ScatterMoE", "MoMoE", "upper bound"), cells, strict=True):
                rows.append(
                    _row(
                        "fig1",
                        device,
                        "30B",
                        _sizes(shape("30B", n)),
                        method,
                        "fwd",
                        "TFLOPS",
                        value,
                        "digitised",
                        source,
                    )
                )
    for n, cells in _FIG1_MEMORY.items():
        for method, value in zip(_SEVEN[:2] + ("MoMoE",), cells, strict=True):
            rows.append(
                _row(
                    "fig1",
                    "H100",
                    "30B",
                    _sizes(shape("30B", n)),
                    method,
                    "peak",
                    "GiB",
                    value,
                    "digitised",
                    "v1 Fig 1 left",
                )
            )
    return _table(rows)


def fig6() -> pd.DataFrame:
    """Fig 6: forward and backward time in ms of the 7B n=256 layer on an H100, and the kernels that the text names."""
    sizes = _sizes(shape("7B", 256))
    rows = []
    for method, values in _FIG6.items():
        for quantity, value in zip(("fwd", "bwd"), values, strict=True):
            if value is not None:
                rows.append(
                    _row("fig6", "H100", "7B", sizes, method, quantity, "ms", value, "reported", "v1 Fig 6 (digest)")
                )
    for method, kernel, *values in _FIG6_KERNELS:
        for unit, value in zip(("ms", "TFLOPS", "TB/s"), values, strict=True):
            if value is not None:
                rows.append(
                    _row("fig6", "H100", "7B", sizes, method, kernel, unit, value, "stated", "v1 section 6.2 on Fig 6")
                )
    return _table(rows)


def fig13() -> pd.DataFrame:
    """Fig 13: peak memory in GiB per layer on an H100, expert weights included."""
    return _table(
        _row("fig13", "H100", size, _sizes(shape(size, n)), method, "peak", "GiB", value, "digitised", "v1 Fig 13")
        for (size, n), cells in _FIG13.items()
        for method, value in zip(_SEVEN, cells, strict=True)
        if value is not None
    )


def fig14() -> pd.DataFrame:
    """Fig 14: forward and backward TFLOPS per layer (router inside the timed region) on an H100."""
    return _table(
        _row("fig14", "H100", size, _sizes(shape(size, n)), method, quantity, "TFLOPS", value, "digitised", "v1 Fig 14")
        for (size, n), passes in _FIG14.items()
        for quantity, cells in zip(("fwd", "bwd"), passes, strict=True)
        for method, value in zip(_SEVEN, cells, strict=True)
        if value is not None
    )


def fig15() -> pd.DataFrame:
    """Fig 15: forward and backward TFLOPS of six open models; of the H100 only DeepSeek-V3.2's are printed."""
    deepseek = MODEL_SHAPES["DeepSeek-V3.2-Exp"]
    rows = [
        _row(
            "fig15",
            "H100",
            "DeepSeek-V3.2-Exp",
            deepseek,
            "SonicMoE",
            quantity,
            "TFLOPS",
            value,
            "stated",
            "v1 section 6.2 on Fig 15",
        )
        for quantity, value in (("fwd", 534.8), ("bwd", 480.1))
    ]
    next_shape = MODEL_SHAPES["Qwen3-Next-80B-A3B-Thinking"]
    for method, fwd, bwd in (("ScatterMoE", 61, 85), ("MoMoE", 92, 120)):
        for quantity, value in (("fwd gain of SonicMoE", fwd), ("bwd gain of SonicMoE", bwd)):
            rows.append(
                _row("fig15", "H100", "Qwen3-Next-80B-A3B-Thinking", next_shape, method, quantity, "%", value, "stated",
                     "v1 section 6.2 on Fig 15")
            )  # fmt: skip
    for method, passes in _FIG15_B300.items():
        for quantity, cells in zip(("fwd", "bwd"), passes, strict=True):
            for (model, sizes), value in zip(MODEL_SHAPES.items(), cells, strict=True):
                if value is not None:
                    rows.append(
                        _row(
                            "fig15",
                            "B300",
                            model,
                            sizes,
                            method,
                            quantity,
                            "TFLOPS",
                            value,
                            "digitised",
                            "authors' page, B300",
                        )
                    )
    return _table(rows)


def fig16() -> pd.DataFrame:
    """Fig 16: percent that token rounding gains over top-K at the two points that the text states (H100, no router)."""
    rows = []
    for sizes, gains in (
        ((16384, 1536, 1024, 128, 2), (16.5, 6.1, 9.4)),
        ((16384, 4096, 1024, 256, 4), (25.7, 11.8, 15.9)),
    ):
        for quantity, value in zip(("fwd gain", "bwd gain", "fwd_bwd gain"), gains, strict=True):
            rows.append(
                _row(
                    "fig16", "H100", "", sizes, "SonicMoE", quantity, "%", value, "stated", "v1 section 6.3.3 on Fig 16"
                )
            )
    return _table(rows)


def fig17() -> pd.DataFrame:
    """Fig 17: what token rounding gains over top-K, in percent, for the one open model that the text states (H100)."""
    model = "Qwen3-Next-80B-A3B-Thinking"
    return _table(
        _row(
            "fig17",
            "H100",
            model,
            MODEL_SHAPES[model],
            "SonicMoE",
            quantity,
            "%",
            value,
            "stated",
            "v1 section 6.3.3 on Fig 17",
        )
        for quantity, value in (("fwd gain", 19.6), ("bwd gain", 7.9))
    )


def fig19() -> pd.DataFrame:
    """Fig 19: percent that SonicMoE's down-projection gains over DeepGEMM's on contiguous rows, 30B (H100)."""
    return _table(
        _row("fig19", "H100", "30B", _sizes(shape("30B", n)), "DeepGEMM", "down_proj gain of SonicMoE", "%", value,
             "stated", "v1 text on Fig 19")
        for n, value in ((256, 57.4), (512, 14.0), (1024, 5.3))
    )  # fmt: skip


def numbers() -> pd.DataFrame:
    """All figures above in one long table: one row per number, with device, sizes, implementation, kind and source."""
    return pd.concat([fig1(), fig6(), fig13(), fig14(), fig15(), fig16(), fig17(), fig19()], ignore_index=True)


def headline() -> pd.DataFrame:
    """The paper's headline claims, all stated by it: claim, value, unit, sizes where the claim has them, source."""
    rows = [
        (claim, float(value), unit, *(sizes or (None,) * 5), "stated", source)
        for claim, value, unit, sizes, source in _HEADLINE
    ]
    return pd.DataFrame(rows, columns=["claim", "value", "unit", "T", "d", "n", "E", "K", "kind", "source"]).astype(
        dict.fromkeys("TdnEK", "Int64")
    )


def open_models() -> pd.DataFrame:
    """Table 1: open models with K, E, d, n, G = d/n and rho = K/E; shared experts excluded."""
    table = pd.DataFrame(list(_OPEN_MODELS), columns=["model", "date", "parameters", "K", "E", "d", "n"])
    return table.assign(G=table.d / table.n, rho=table.K / table.E, source="v1 Table 1")


def features() -> pd.DataFrame:
    """Table 2: what each method does between its GEMMs, `value` True, False or None where it does not apply."""
    rows = [
        (feature, method, METHODS[method], value, "stated", "v1 Table 2")
        for feature, values in _TABLE2.items()
        for method, value in zip(_TABLE2_METHODS, values, strict=True)
    ]
    columns = ["feature", "method", "impl", "value", "kind", "source"]
    return pd.DataFrame(rows, columns=columns).astype({"value": object})


def configs() -> pd.DataFrame:
    """Table 9: the shapes of Figs 1, 13, 14 and the finer ones of Fig 3, with the weights' and the activations' GiB."""
    rows = []
    for part, table in (("v1 Table 9b", CONFIGS), ("v1 Table 9a", FIG3_CONFIGS)):
        for size, cells in table.items():
            for n, *_ in cells:
                s = shape(size, n)
                rows.append((size, *_sizes(s), s.G, s.rho, weight_bytes(s) / GIB, held_bytes("sonic", s) / GIB, part))
    columns = ["model", "T", "d", "n", "E", "K", "G", "rho", "weights_gib", "held_gib", "source"]
    return pd.DataFrame(rows, columns=columns)


def forward_tflops(device: str = "H100") -> pd.DataFrame:
    """Forward TFLOPS by (T, d, n, E, K, impl): of Fig 14 where it has the point, else of Fig 1 (bound, n=2048)."""
    return _first_of("fwd", "TFLOPS", fig14(), fig1(), device=device)


def backward_tflops(device: str = "H100") -> pd.DataFrame:
    """Backward TFLOPS of Fig 14 by (T, d, n, E, K, impl)."""
    return _first_of("bwd", "TFLOPS", fig14(), device=device)


def layer_ms() -> pd.DataFrame:
    """The H100 layer's fwd_ms and fwd_bwd_ms that Fig 14's TFLOPS amount to, by (T, d, n, E, K, impl)."""
    keys = [*"TdnEK", "impl"]
    both = forward_tflops().merge(backward_tflops(), on=keys, suffixes=("_fwd", "_bwd"))
    work = 6e-9 * both["T"] * both.K * both.n * both.d
    fwd_ms = work / both.value_fwd
    return both[keys].assign(fwd_ms=fwd_ms, fwd_bwd_ms=fwd_ms + 2 * work / both.value_bwd)


def peak_memory(device: str = "H100") -> pd.DataFrame:
    """Peak GiB of Figs 13 and 1 by (T, d, n, E, K, impl), and `held_gib`: what remains of it for the backward.

    Within 0.05 GiB the bars of all methods are the weights and what `held_bytes` counts, SonicMoE's with its output
    (2Td bytes) beside (exceptions, higher: Megatron at 30B K=16, MegaBlocks at 120B K=8). `held_gib` takes those two
    off: kind `derived`.
    """
    table = _first_of("peak", "GiB", fig13(), fig1(), device=device)
    shapes = [Shape(*sizes) for sizes in table[list("TdnEK")].itertuples(index=False)]
    beside = [
        weight_bytes(s) + (2 * s.T * s.d if impl == "sonic" else 0) for s, impl in zip(shapes, table.impl, strict=True)
    ]
    return table.assign(held_gib=[gib - size / GIB for gib, size in zip(table.value, beside, strict=True)])


def _first_of(quantity: str, unit: str, *tables: pd.DataFrame, device: str) -> pd.DataFrame:
    joined = pd.concat(tables, ignore_index=True)
    chosen = joined[(joined.quantity == quantity) & (joined.unit == unit) & (joined.device == device)]
    return chosen.drop_duplicates([*"TdnEK", "impl"], keep="first").reset_index(drop=True)


def weight_bytes(shape: Shape, width: int = 2) -> int:
    """Bytes of W1 (E, 2n, d) and W2 (E, d, n): 3 E d n elements of `width` bytes."""
    return 3 * shape.E * shape.d * shape.n * width


#: Implementation -> elements kept for the backward per layer, as (Td, R n, R d) coefficients; section 3.2 and Fig 13.
_HELD = {
    "sonic": (1, 2, 0),  # X, H
    "sonicmoe_official": (1, 2, 0),
    "momoe_save_all": (1, 2, 1),  # X, H, Y
    "scattermoe": (1, 3, 1),  # X, H, A, Y
    "scattermoe_style": (1, 3, 1),
    "standard_style": (1, 3, 2),  # X, gathered X, H, A, Y
    "megatron": (1, 3, 2),
    "deepgemm_pt": (1, 2, 1),  # X, gathered X, H; its rows are padded to 128 per expert, which R leaves out
    "deepgemm_pp": (1, 2, 1),
    "megablocks": (0, 2, 2),  # gathered X, H, Y; padded to 128 per expert as well
    "megablocks_style": (0, 2, 2),
}


def held_bytes(impl: str, shape: Shape, R: int | None = None, width: int = 2) -> int | None:
    """Activation bytes kept for the backward by the paper's formula, or None where there is no formula.

    `sonic`: 2Td + 4TKn in 16-bit types. R routed rows (T*K by default), `width` bytes per element.
    """
    if impl not in _HELD:
        return None
    rows = shape.R if R is None else R
    td, rn, rd = _HELD[impl]
    return width * (td * shape.T * shape.d + rn * rows * shape.n + rd * rows * shape.d)


#: Kernel -> pass and elements moved, as (Td, R n, R d, E d n) coefficients; sums equal the authors' IO figure for
#: Qwen3-235B.
_IO = {
    "up_proj": ("fwd", (0, 3, 1, 2)),  # gather X, W1; write H, A
    "down_proj": ("fwd", (0, 1, 1, 1)),  # A, W2; write Y
    "aggregate": ("fwd", (1, 0, 1, 0)),  # Y; write O
    "d_act": ("bwd", (0, 5, 1, 1)),  # gather dO, W2, H; write dH, A'
    "weight_grad_2": ("bwd", (0, 1, 1, 1)),  # gather dO, A'; write dW2
    "d_input": ("bwd", (0, 2, 1, 2)),  # dH, W1; write dXt
    "weight_grad_1": ("bwd", (0, 2, 1, 2)),  # gather X, dH; write dW1
    "d_aggregate": ("bwd", (1, 0, 1, 0)),  # dXt; write dX
}

#: Implementation -> what it moves beyond SonicMoE, in the same coefficients, forward and backward. Reproduces the
#: totals of the authors' figure: forward 15.25, 15.75, 23.25 and backward 41.75, 38.75, 39.75 GiB against 13.75 and
#: 26.75.
_IO_EXTRA = {
    "sonic": ((0, 0, 0, 0), (0, 0, 0, 0)),
    # H read again by SwiGLU | gathers of X and dO as kernels, Y read for dS, dY scaled, dA and dSwiGLU as kernels
    "scattermoe": ((0, 2, 0, 0), (0, 4, 6, 0)),
    # Y scaled before it is summed | as ScatterMoE, dSwiGLU in an epilogue
    "momoe_save_all": ((0, 0, 1, 0), (0, 0, 6, 0)),
    # gather and scatter as kernels, SwiGLU as a kernel | likewise, X kept in rows
    "standard_style": ((0, 2, 4, 0), (0, 4, 5, 0)),
}


def io_bytes(shape: Shape, R: int | None = None, width: int = 2) -> pd.DataFrame:
    """Bytes of SonicMoE's eight kernels (columns kernel, direction, bytes); gathered rows count every use."""
    rows = [(kernel, direction, _elements(parts, shape, R) * width) for kernel, (direction, parts) in _IO.items()]
    return pd.DataFrame(rows, columns=["kernel", "direction", "bytes"])


def io_multiples(impl: str, direction: str) -> tuple[int, int, int, int]:
    """How often a layer moves T d, R n, R d and E d n elements in `fwd` or `bwd` by the paper's IO model; KeyError
    lists whom it covers."""
    if impl not in _IO_EXTRA:
        raise KeyError(f"no IO model of {impl!r}; there is one of {', '.join(_IO_EXTRA)}")
    extra = _IO_EXTRA[impl][("fwd", "bwd").index(direction)]
    kernels = [parts for kind, parts in _IO.values() if kind == direction]
    td, rn, rd, edn = (sum(column) for column in zip(extra, *kernels, strict=True))
    return td, rn, rd, edn


def io_total(impl: str, direction: str, shape: Shape, R: int | None = None, width: int = 2) -> int:
    """Bytes that a layer moves in `fwd` or `bwd` by `io_multiples`, whose KeyError it raises."""
    return width * _elements(io_multiples(impl, direction), shape, R)


def _elements(parts: tuple[int, int, int, int], shape: Shape, R: int | None) -> int:
    rows = shape.R if R is None else R
    td, rn, rd, edn = parts
    return td * shape.T * shape.d + rn * rows * shape.n + rd * rows * shape.d + edn * shape.E * shape.d * shape.n


def arithmetic_intensity(shape: Shape) -> float:
    """FLOPs per byte of one expert's forward under uniform routing, H not written: 3 / (2/d + 2/n + 3/T_e), eq 4."""
    tokens = shape.T * shape.rho
    return 3 / (2 / shape.d + 2 / shape.n + 3 / tokens)


def expected_padding(shape: Shape, tile_m: int = 128) -> float:
    """Padding over model FLOPs under random routing: half a tile of `tile_m` rows per expert, E m / (2 T K)."""
    return shape.E * tile_m / 2 / shape.R


def wasted_flops(shape: Shape, mode: str = "fwd_bwd", tile_m: int = 128) -> float:
    """FLOPs that this padding amounts to under top-K, 9 n d E m in both passes: what Fig 11 shows. Loads that are
    multiples of the tile waste none."""
    return expected_padding(shape, tile_m) * shape.flops(mode)
