# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of the measured rows
#
# `python -m sonic.sweep` measures MoE layers into `results/<sweep>/<gpu>.jsonl`; this notebook reads those rows, draws
# the figures that mirror SonicMoE (arXiv 2512.14080) and puts the paper's numbers beside them. It needs no GPU and no
# torch.
#
# Keep the two files of this notebook in step with `jupytext --sync notebooks/tour.py`; commit the `.ipynb` without
# outputs.

# %%
import sys
from pathlib import Path

import pandas as pd
from IPython.display import display

# A notebook's folder is not the clone's.
sys.path.insert(0, str(next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "analysis").is_dir())))

from analysis import figures, load, paper
from sonic.shapes import Shape

# %% tags=["parameters"]
results_path = None  # a folder of rows; None is the one of this clone
gpu = None  # a slug such as "nvidia-h200" or "cpu"; None is the only GPU that has rows

# %%
results = Path(results_path) if results_path else load.RESULTS
pd.options.display.max_rows = 200

# %% [markdown]
# ## Shapes: granularity and sparsity as axes
#
# T tokens, width d, E experts of size n, K of them per token. Granularity G = d/n moves n, E and K together so that
# work and parameters stay; the activation ratio rho = K/E moves E alone. On the command line they are `shape.G=2,4,8`
# and `shape.rho=1/16`.

# %%
base = Shape(T=24576, d=1536, n=256, E=128, K=8)
shapes = [base.with_granularity(G) for G in (1.5, 3, 6, 12, 24)] + [
    base.with_rho(rho) for rho in ("1/8", "1/32", "1/64")
]
pd.DataFrame(
    {
        **{name: [getattr(shape, name) for shape in shapes] for name in ("T", "d", "n", "E", "K", "G", "rho")},
        "forward TFLOP": [shape.flops("fwd") / 1e12 for shape in shapes],
        "weights GiB": [paper.weight_bytes(shape) / paper.GIB for shape in shapes],
        "held GiB (2Td + 4TKn)": [paper.held_bytes("sonic", shape) / paper.GIB for shape in shapes],
        "forward IO GiB (model)": [paper.io_total("sonic", "fwd", shape) / paper.GIB for shape in shapes],
        "FLOP per byte (eq 4)": [paper.arithmetic_intensity(shape) for shape in shapes],
    }
).round(4)

# %% [markdown]
# Finer experts do the same FLOPs with more IO, sparser ones with less work per weight: that is what the kernels have to
# live with, and open models have moved in both directions (Table 1 of the paper):

# %%
paper.open_models().round(3)

# %% [markdown]
# ## What was measured
#
# One line per point, the newest row of each. Lines that are no rows are reported, not fatal.

# %%
rows, faults = load.rows(results)
for fault in faults:
    print(f"{fault.path}:{fault.line_number}: left out, {fault.reason}")
rows.groupby(["sweep", "gpu", "impl", "status"]).size().unstack(fill_value=0)

# %% [markdown]
# ## The closing figures of the default sweeps
#
# `smoke` runs everywhere: its times are a CPU's, with Triton kernels in the interpreter, and say nothing about a GPU.

# %%
figures.show("smoke", results, "cpu" if "cpu" in load.gpus(rows) else None)

# %%
figures.show("quick", results, gpu)

# %% [markdown]
# ## Granularity (mirrors Fig 1)
#
# Hollow diamonds are the paper's H100 values. Memory held for the backward should be flat for `sonic`: it keeps X and H
# only.

# %%
granularity = figures.show("fig1", results, gpu)
display(granularity)

# %% [markdown]
# The same as numbers: `fwd_vs_paper` is ours over the paper's (another card, so not 1), `sonic_speed` how many times as
# long an implementation takes for forward and backward as `sonic`, with the paper's factor beside it.

# %%
display(granularity.table if granularity else "no rows")

# %% [markdown]
# ## Sparsity (mirrors Fig 16) and tile sizes

# %%
figures.show("sparsity", results, gpu)

# %%
figures.show("tile", results, gpu)

# %% [markdown]
# ## A question of your own
#
# Rows are an ordinary table. Here: time and held memory of each implementation over those of `sonic`, at every shape of
# whole layers, each at its fastest setting. Only rows of one sweep and environment meet in a line: there the
# implementations ran in turn, while between two sweeps the card's clocks may differ. `ms` is the device time on a GPU
# and the wall clock on a CPU.

# %%
layers = rows[(rows.sweep == "granularity") & (rows.op == "layer") & rows.ms.notna()]
by = ["gpu", "env_id", "dtype", "mode", "T", "d", "G", "rho", "impl"]
fastest = layers.sort_values("ms").drop_duplicates(by).set_index(by)[["ms", "held_gib"]].unstack("impl").sort_index()
if "sonic" in set(layers.impl):
    ratios = {name: fastest[name].div(fastest[name]["sonic"], axis=0) for name in ("ms", "held_gib")}
    display(pd.concat(ratios, axis=1).round(3))

# %% [markdown]
# ## Where the numbers come from

# %%
display(load.environments(results, rows.env_id.unique()).set_index("env_id").T)

# %% [markdown]
# The paper's headline claims, to be held against the tables above:

# %%
paper.headline()[["claim", "value", "unit", "source"]]

# %% [markdown]
# ## Next
#
# - `python -m sonic.sweep sweeps=granularity shape=7b` fills the granularity figure for one model size, `--list` names
#   the other sweeps, `--dry-run` shows the points of one.
# - `python -m analysis` draws all figures that have rows to `results/figures/`; `python -m analysis.report` makes one
#   HTML page of them.
# - A new figure is one file `analysis/<id>_<name>.py`; see `analysis/figures.py` for what it holds.
