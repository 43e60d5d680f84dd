"""Hugging Face transformers (Apache-2.0, https://github.com/huggingface/transformers), `Qwen3MoeSparseMoeBlock`, read
at 5.17.0.

The block that a model loaded with `from_pretrained` runs, with its own router: softmax over all experts in fp32,
top-K, renormalised, scores rounded to the dtype of x. Its weights lie as here: gate rows, then up rows, (E, 2n, d) and
(E, d, n). `experts_implementation` is `grouped_mm`, the package's default, and its per-expert loop `eager` where
grouped_mm refuses the dtype or the alignment; the note says which ran. `transformers_eager` always runs the loop.
Versions before 5 keep a module per expert and are not supported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

import torch

from sonic.impls import torch_grouped_mm
from sonic.impls._common import Adapter, dtype_refusal
from sonic.problem import Problem
from sonic.record import Point

MAJOR = 5


class Impl(Adapter):
    OPS = frozenset({"layer"})
    family = "torch"
    undeclared = "its version and experts_implementation decide"
    #: Forces the per-expert loop.
    EAGER = False

    @staticmethod
    def available() -> str | None:
        if importlib.util.find_spec("transformers") is None:
            return "package 'transformers' is not installed (pip install \"transformers>=5\")"
        version = importlib.metadata.version("transformers")
        if int(version.split(".")[0]) < MAJOR:
            return f"transformers is {version}; its fused expert weights need {MAJOR}.0 or newer"
        return None

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("transformers")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if point.shape.T == 0:
            return "shape.T is 0; the block cannot reshape an empty batch"
        # Its router takes the softmax in fp32 whatever the inputs are, far from what fp64 promises.
        return dtype_refusal(point, ("bf16", "fp16", "fp32"))

    def __init__(self, problem: Problem, point: Point) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        super().__init__(problem, point)
        refusal = None if self.EAGER else torch_grouped_mm.Impl.supports(point, problem.device)
        experts = "grouped_mm" if refusal is None and not self.EAGER else "eager"
        self.note = f"experts_implementation={experts}" + (f" ({refusal})" if refusal else "")
        shape = problem.shape
        config = Qwen3MoeConfig(
            hidden_size=shape.d,
            moe_intermediate_size=shape.n,
            num_experts=shape.E,
            num_experts_per_tok=shape.K,
            norm_topk_prob=True,
            hidden_act="silu",
        )
        config._experts_implementation = experts
        with torch.device("meta"):
            self.block = Qwen3MoeSparseMoeBlock(config)
        self.block.experts.gate_up_proj = torch.nn.Parameter(self.w1_E2nd)
        self.block.experts.down_proj = torch.nn.Parameter(self.w2_Edn)
        self.block.gate.weight = torch.nn.Parameter(self.router_w_Ed)

    def forward(self) -> torch.Tensor:
        return self.block(self.x_Td[None])[0]

    def weights(self) -> Sequence[torch.Tensor]:
        return tuple(self.block.parameters())

    def grads(self) -> dict[str, torch.Tensor]:
        block = self.block
        return {
            "dx_Td": self.x_Td.grad,
            "dw1_E2nd": block.experts.gate_up_proj.grad,
            "dw2_Edn": block.experts.down_proj.grad,
            "drouter_Ed": block.gate.weight.grad,
        }

    def zero_grad(self) -> None:
        super().zero_grad()
        self.block.zero_grad(set_to_none=True)
