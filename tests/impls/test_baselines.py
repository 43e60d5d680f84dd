"""Adapters of packages that a CPU cannot run, against stand-ins with the packages' own signatures and layouts; what
`properties` declares; our kernels under other packages' strategies."""

import functools
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import triton

from sonic import impls
from sonic.impls import _common, _padded, deepgemm_pt, liger, megablocks, megatron, moe_ops, momoe, momoe_save_all
from sonic.kernels.metadata import metadata_torch
from sonic.record import Point
from sonic.shapes import Shape
from tests.impls.test_adapters import CPU, check, point, problem_of

STYLES = ("scattermoe_style", "momoe_style", "megablocks_style", "standard_style")
PACKAGES = ("liger", "momoe", "momoe_save_all", "megablocks", "megatron", "deepgemm_pt", "deepgemm_pp", "moe_ops")
ROUTINGS = [("layer", "learned"), ("experts", "zipf")]


def tuner(**choices: list) -> types.SimpleNamespace:
    """An autotuned function with every combination of tile sizes, warps and stages."""
    sizes = {name: values for name, values in choices.items() if not name.startswith("num_")}
    options = {name: choices.get(name, [4]) for name in ("num_warps", "num_stages")}
    configs = []
    for values in itertools.product(*sizes.values(), *options.values()):
        given = dict(zip((*sizes, *options), values, strict=True))
        counts = {name: given.pop(name) for name in options}
        configs.append(triton.Config(given, **counts))
    return types.SimpleNamespace(configs=configs, cache={}, base_fn=types.SimpleNamespace(__name__="kernel"))


def install(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Puts stand-ins where `import` looks, with each also an attribute of its package; `__` stands for a dot."""
    named = {name.replace("__", "."): module for name, module in modules.items()}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        if package in named:
            setattr(named[package], last, module)


def experts(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor):
    """The layer from gate_up (E, d, 2n), gate columns first, and down (E, n, d)."""
    out = torch.zeros_like(x)
    for e, (w1, w2) in enumerate(zip(gate_up, down, strict=True)):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ w1).chunk(2, dim=-1)
        out = out.index_add(0, token, (F.silu(gate) * up) @ w2 * scores[token, slot, None].to(x.dtype))
    return out


# Liger


@pytest.fixture
def fake_liger(monkeypatch):
    def apply(x, w1, w2, ids, scores):
        assert ids.dtype == torch.int32 and scores.dtype == torch.float32 and w1.is_contiguous() and w2.is_contiguous()
        return experts(x, ids, scores, w1.transpose(1, 2), w2.transpose(1, 2))

    gemm = {"BLOCK_N": [64, 128], "BLOCK_K": [32, 64], "num_warps": [4, 8], "num_stages": [2, 3, 4, 5]}
    lists = {
        "gemm": gemm,
        "weight_grad": {"BLOCK_M": [64, 128], "BLOCK_N": [64, 128], "BLOCK_K": [16, 32], "num_warps": [4, 8]}
        | {"num_stages": [2]},
        "sum": {"BLOCK_H": [64, 128, 256, 512], "BLOCK_K": [1, 2, 4, 8, 16], "num_warps": [4, 8]},
    }
    tuners = {name: tuner(**lists[kind]) for kind, names in liger._TUNERS.items() for name in names}
    function = types.SimpleNamespace(apply=apply)
    install(
        monkeypatch,
        liger_kernel=types.ModuleType("liger_kernel"),
        liger_kernel__ops=types.ModuleType("ops"),
        liger_kernel__ops__fused_moe=types.SimpleNamespace(LigerFusedMoEFunction=function),
        liger_kernel__ops__fused_moe_kernels=types.SimpleNamespace(**tuners),
    )
    monkeypatch.delenv("SONIC_TUNE", raising=False)
    return tuners


@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_liger_reads_our_weights_where_they_lie(op, distribution, fake_liger):
    check(liger.Impl, point("liger", op, distribution, (40, 32, 16, 8, 2), "fp32"))


def test_liger_cuts_its_tuners_as_tune_says(fake_liger, monkeypatch):
    p = point("liger", "experts", "uniform", (9, 16, 8, 8, 2), "fp32")

    def found(tune: str) -> tuple[str, set[int]]:
        monkeypatch.setenv("SONIC_TUNE", tune)
        note = liger.Impl(problem_of(p), p).note
        return note, {len(fake_liger[name].configs) for name in liger._TUNERS["gemm"]}

    assert found("cached") == ("tuner cut: configs per kernel 4 gemm, 3 weight_grad, 3 sum", {4})
    assert found("off") == ("tuner off: configs per kernel 1 gemm, 1 weight_grad, 1 sum", {1})
    assert found("full") == ("tuner over all configs", {32})


def test_a_tuner_forgets_its_choices_only_when_its_list_changes():
    kernel = tuner(BLOCK=[16, 32, 64], num_warps=[4, 8])
    every = kernel.configs
    kernel.cache["shape"] = "a choice among all"
    _common.restrict_triton(kernel, None)
    assert kernel.cache and kernel.configs == every
    _common.restrict_triton(kernel, [{"BLOCK": 32}, {"BLOCK": 64, "num_warps": 8}])
    assert [(c.kwargs["BLOCK"], c.num_warps) for c in kernel.configs] == [(32, 4), (32, 8), (64, 8)]
    assert not kernel.cache
    _common.restrict_triton(kernel, None)
    assert kernel.configs == every
    with pytest.raises(RuntimeError, match=r"kernel has none of the configurations \[{'BLOCK': 128}\]"):
        _common.restrict_triton(kernel, [{"BLOCK": 128}])


# MoMoE


class FakeMoMoE(torch.nn.Module):
    """Stands for MoMoE's module: (E, d, 2n) with up columns first, (E, n, d), dense mask and scores (E, T)."""

    def __init__(self, d, n, E, K, save_percent=0, Wl1_ND2H=None, Wl2_NHD=None):
        super().__init__()
        assert Wl1_ND2H.shape == (E, d, 2 * n) and Wl2_NHD.shape == (E, n, d)
        self.Wl1_ND2H, self.Wl2_NHD = torch.nn.Parameter(Wl1_ND2H), torch.nn.Parameter(Wl2_NHD)
        self.K, self.save_percent = K, save_percent

    def forward(self, x, mask, s):
        w1, w2 = self.Wl1_ND2H, self.Wl2_NHD
        assert mask.dtype == torch.int32 and s.dtype == torch.float32 and w1.is_contiguous() and w2.is_contiguous()
        assert mask.shape == s.shape == (len(w1), x.shape[1]) and bool((mask.sum(0) == self.K).all())
        assert bool((s.T[mask.T == 0] == 0).all())
        ids = mask.T.nonzero()[:, 1].view(x.shape[1], self.K)
        up, gate = w1.chunk(2, dim=-1)
        out = experts(x[0], ids, s.T.gather(1, ids), torch.cat([gate, up], dim=-1), w2)
        return out[None], mask.sum(1)


@pytest.fixture
def fake_momoe(monkeypatch):
    gemm = {"BLOCK_SIZE_Mi": [64, 128], "BLOCK_SIZE_H": [64, 128], "BLOCK_SIZE_D": [32, 64, 128]}
    kernels = {name: tuner(**gemm, GROUP_SIZE_Mi=[4, 8]) for name in momoe._GEMMS}
    tiles = {"BLOCK_SIZE_X": [128], "BLOCK_SIZE_Y": [128], "GROUP_SIZE_X": [4, 8]}
    kernels["weights_update_kernel"] = tuner(BLOCK_SIZE_Mi=[32, 64], **tiles)
    kernels["scatter_cols_kernel"] = tuner(BLOCK_SIZE_M=[256, 1024])
    package = types.SimpleNamespace(MoMoE=FakeMoMoE, **kernels)
    install(monkeypatch, momoe=types.ModuleType("momoe"), momoe__momoe=package)
    monkeypatch.delenv("SONIC_TUNE", raising=False)


@pytest.mark.parametrize("adapter", [momoe, momoe_save_all])
@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_momoe_gets_its_own_layout_and_a_dense_routing(adapter, op, distribution, fake_momoe):
    p = point("momoe", op, distribution, (40, 32, 16, 8, 2), "fp32")
    check(adapter.Impl, p)
    impl = adapter.Impl(problem_of(p), p)
    saved = 100 if adapter is momoe_save_all else 0
    assert impl.block.save_percent == saved and impl.note.startswith(f"save_percent={saved}; tuner cut")


# MegaBlocks and Megatron


class FakeDropless(torch.nn.Module):
    """Stands for `ParallelDroplessMLP` with a grouped GLU: gate, up and down as (E n, d)."""

    def __init__(self, arguments):
        super().__init__()
        self.args, self.mlp = arguments, torch.nn.Module()
        rows = arguments.moe_num_experts * arguments.ffn_hidden_size
        for name in ("w1", "v1", "w2"):
            empty = torch.empty(rows, arguments.hidden_size, device=arguments.device)
            setattr(self.mlp, name, torch.nn.Parameter(empty))

    def forward(self, x, scores, weights, ids):
        E, mlp = self.args.moe_num_experts, self.mlp
        assert all(weight.is_contiguous() for weight in mlp.parameters()) and x.ndim == 3 and scores is None
        gate, up, down = (w.view(E, -1, self.args.hidden_size) for w in (mlp.w1, mlp.v1, mlp.w2))
        gate_up = torch.cat([gate, up], dim=1).transpose(1, 2)
        return experts(x[0], ids, weights, gate_up, down)[None]


@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_megablocks_gets_three_weights_of_rows(op, distribution, monkeypatch):
    made = []

    def arguments(**given):
        made.append(given)
        return types.SimpleNamespace(**given)

    install(
        monkeypatch,
        megablocks=types.ModuleType("megablocks"),
        megablocks__layers=types.ModuleType("layers"),
        megablocks__layers__arguments=types.SimpleNamespace(Arguments=arguments),
        megablocks__layers__dmoe=types.SimpleNamespace(ParallelDroplessMLP=FakeDropless),
    )
    check(megablocks.Impl, point("megablocks", op, distribution, (40, 32, 16, 8, 2), "fp32"))
    assert made[0]["mlp_impl"] == "grouped" and made[0]["memory_optimized_mlp"] and made[0]["activation_fn"] is F.silu
    assert made[0]["bias"] is False and made[0]["device"].type == "meta"


class FakeGroupedMLP(torch.nn.Module):
    """Stands for Megatron's `GroupedMLP`: rows in expert order, counts on the host, scores applied to A."""

    def __init__(self, E, config, groups):
        super().__init__()
        assert groups.ep.size() == groups.expt_tp.size() == groups.expt_dp.size() == 1 and config.gated_linear_unit
        d, n = config.hidden_size, config.moe_ffn_hidden_size
        self.E, self.d = E, d
        self.weight1 = torch.nn.Parameter(torch.empty(d, 2 * n * E))
        self.weight2 = torch.nn.Parameter(torch.empty(n * E, d))

    def forward(self, x, counts, scores):
        assert counts.device.type == "cpu" and counts.dtype == torch.int64
        w1, w2 = self.weight1.view(self.E, self.d, -1), self.weight2.view(self.E, -1, self.d)
        rows = []
        for x_r, s_r, one, two in zip(x.split(counts.tolist()), scores.split(counts.tolist()), w1, w2, strict=True):
            gate, up = (x_r @ one).chunk(2, dim=-1)
            rows.append((F.silu(gate) * up * s_r[:, None]).to(x.dtype) @ two)
        return torch.cat(rows), None


def fake_permute(tokens, routing_map, probs, num_out_tokens):
    """Megatron's `permute`, unfused: rows of one expert in token order."""
    expert, token = routing_map.T.nonzero(as_tuple=True)
    assert len(token) == num_out_tokens
    return tokens[token], probs.T[expert, token], token


def fake_unpermute(rows, token, shape):
    return rows.new_zeros(shape).index_add(0, token, rows)


@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_megatron_gets_rows_of_a_dense_map(op, distribution, monkeypatch):
    names = ["megatron", "megatron__core", "megatron__core__transformer", "megatron__core__transformer__moe"]
    config = types.SimpleNamespace(TransformerConfig=lambda **given: types.SimpleNamespace(**given))
    utils = types.SimpleNamespace(permute=fake_permute, unpermute=fake_unpermute)
    install(
        monkeypatch,
        **{name: types.ModuleType(name) for name in names},
        megatron__core__transformer__moe__moe_utils=utils,
        megatron__core__transformer__moe__experts=types.SimpleNamespace(GroupedMLP=FakeGroupedMLP),
        megatron__core__transformer__transformer_config=config,
    )
    check(megatron.Impl, point("megatron", op, distribution, (40, 32, 16, 8, 2), "fp32"))


# DeepGEMM


def _grouped(x, w, out, expert, block=deepgemm_pt.DeepGemm.properties.padding):
    assert len(x) % block == 0 and expert.dtype == torch.int32 and expert.shape == (len(x),)
    for first in range(0, len(x), block):
        of_block = expert[first : first + block]
        assert bool((of_block == of_block[0]).all())
        out[first : first + block] = x[first : first + block] @ w[int(of_block[0])]


def _weight_grad(a, b, out, sizes, sizes_on_device, start):
    assert start is out and out.dtype == torch.float32 and sizes_on_device.tolist() == sizes
    assert sum(sizes) == len(a) == len(b) and all(size % 128 == 0 for size in sizes)
    for e, (a_r, b_r) in enumerate(zip(a.split(sizes), b.split(sizes), strict=True)):
        out[e] += a_r.float().T @ b_r.float()


@pytest.mark.parametrize("name", ["deepgemm_pt", "deepgemm_pp"])
@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_deepgemm_multiplies_blocks_of_one_expert(name, op, distribution, monkeypatch):
    package = types.SimpleNamespace(
        m_grouped_bf16_gemm_nt_contiguous=lambda x, w, out, e: _grouped(x, w.transpose(1, 2), out, e),
        m_grouped_bf16_gemm_nn_contiguous=_grouped,
        k_grouped_bf16_gemm_tn_contiguous=_weight_grad,
    )
    install(monkeypatch, deep_gemm=package)
    p = point(name, op, distribution, (300, 32, 16, 8, 2))
    check(impls.load(name), p)


def test_padding_keeps_every_row_and_its_score():
    ids = torch.tensor([[0, 2], [2, 5], [2, 0]])
    scores = torch.arange(1.0, 7.0).view(3, 2)
    rows = _padded.pad(metadata_torch(ids.int(), 6), K=2, block=4)
    assert rows.sizes == [4, 0, 4, 0, 0, 4] and rows.expert_P.tolist() == [0] * 4 + [2] * 4 + [5] * 4
    assert rows.meta.offsets_E1.tolist() == [0, 4, 4, 8, 8, 8, 12] and rows.meta.R == 12
    assert rows.scores(scores).tolist() == [1, 6, 0, 0, 2, 3, 5, 0, 4, 0, 0, 0]
    assert rows.meta.gather_idx_R.tolist() == [0, 2, 0, 0, 0, 1, 2, 0, 1, 0, 0, 0]
    assert torch.equal(rows.unpadded(rows.scores(scores)), scores.flatten())


# moe-ops


@pytest.mark.parametrize(("op", "distribution"), ROUTINGS)
def test_moe_ops_composes_its_operators(op, distribution, monkeypatch):
    def permute(x, ids, E):
        assert ids.dtype == torch.int32
        slots = ids.flatten().argsort(stable=True)
        place = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))
        ends = torch.bincount(ids.flatten(), minlength=E).cumsum(0)
        # where a token's k-th row went is at k T + t
        return x[slots // ids.shape[1]], place.view(ids.shape).T.flatten(), F.pad(ends, (1, 0))

    def grouped_gemm(x, w, offsets):
        return torch.cat([r @ m.T for r, m in zip(x.split(offsets.diff().tolist()), w, strict=True)])

    def unpermute(y, row_of_slot, scores, T, K):
        return (y[row_of_slot].view(K, T, -1) * scores.T[..., None].to(y.dtype)).sum(0)

    def fused_topk_softmax(logits, K, fp32_routing):
        assert fp32_routing
        values, ids = logits.topk(K, dim=-1)
        return values.float().softmax(dim=-1), ids.int()

    sizes = {"BLOCK_SIZE_M": [32, 64, 128], "BLOCK_SIZE_N": [128, 256], "BLOCK_SIZE_K": [64, 128]}
    kernel = functools.partial(tuner, **sizes, num_warps=[4, 8], num_stages=[3, 4])
    functions = {f.__name__: f for f in (permute, grouped_gemm, unpermute, fused_topk_softmax)}
    package = types.ModuleType("moe_ops")
    vars(package).update(functions)
    install(
        monkeypatch,
        moe_ops=package,
        moe_ops__grouped_gemm_ops=types.SimpleNamespace(gmm_gradB_kernel=kernel()),
        moe_ops__grouped_gemm_ops_sm90=types.SimpleNamespace(grouped_matmul_tma_kernel=kernel()),
    )
    monkeypatch.delenv("SONIC_TUNE", raising=False)
    check(moe_ops.Impl, point("moe_ops", op, distribution, (40, 32, 16, 8, 2), "fp32"))


# What adapters say of themselves


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "reason"),
    [
        ("liger", (8, 16, 16, 4, 2), "fp32", "dtype is 'fp32'; allowed: bf16, fp16"),
        ("liger", (0, 16, 16, 4, 2), "bf16", "shape.T is 0"),
        ("momoe", (8, 16, 16, 4, 2), "fp16", "dtype is 'fp16'; allowed: bf16"),
        ("momoe", (32768, 4096, 256, 256, 16), "bf16", None),
        ("momoe", (32768, 7168, 2048, 256, 8), "bf16", "E*d*2n is 7516192768; its kernels count elements in 32 bits"),
        ("megablocks", (65536, 4096, 256, 256, 16), "bf16", "T*K*d is 4294967296"),
        ("deepgemm_pt", (8, 96, 64, 4, 2), "bf16", "shape.d is 96; its GEMMs need multiples of 64"),
        ("deepgemm_pp", (8, 128, 64, 4, 2), "bf16", None),
        ("moe_ops", (8, 64, 64, 12, 2), "bf16", "shape.E is 12; its histogram needs a power of two"),
        ("moe_ops", (8, 64, 20, 16, 2), "bf16", "shape.n is 20; its kernels need multiples of 8"),
        ("megatron", (8, 16, 16, 4, 2), "bf16", None),
    ],
)
def test_a_refusal_names_field_value_and_rule(name, shape, dtype, reason, hopper):
    refusal = impls.load(name).supports(point(name, "experts", "uniform", shape, dtype), hopper)
    assert (refusal is None) if reason is None else reason in refusal


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_tells_how_to_install_it(name, monkeypatch):
    monkeypatch.setattr(_common.importlib.util, "find_spec", lambda module: None)
    reason = impls.load(name).available()
    assert reason is not None and reason.startswith(f"{name}: package ") and "pip install" in reason


def saved_bytes(p: Point) -> tuple[int, object]:
    """Bytes of the matrices in the problem's dtype that one forward keeps, weights left out, and the adapter."""
    impl = impls.load(p.impl)(problem_of(p), p)
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dtype == impl.problem.dtype and tensor.shape[-1] > 1:  # scores may have it too
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = impl.forward()
    for weight in (*impl.weights(), out):
        found.pop(weight.untyped_storage().data_ptr(), None)
    found[impl.x_Td.untyped_storage().data_ptr()] = impl.x_Td.untyped_storage().nbytes()
    return sum(found.values()), impl


@pytest.mark.parametrize("name", [*STYLES, "torch_grouped_mm", "sonic"])
def test_what_is_declared_kept_is_what_is_kept(name):
    p = point(name, "experts", "zipf", (300, 64, 32, 12, 3))
    kept, impl = saved_bytes(p)
    block = impl.properties.padding
    rows = int(((impl.problem.counts_E + block - 1) // block * block).sum())
    assert kept == impl.properties.held_bytes(impl.problem.shape, 2, rows)


def test_held_bytes_are_the_formulas_of_the_paper():
    shape = Shape(T=24576, d=1536, n=256, E=128, K=8)
    T, d, n, K = shape.T, shape.d, shape.n, shape.K
    formulas = {
        "sonic": 2 * T * d + 4 * T * K * n,
        "momoe": 2 * T * d,
        "momoe_save_all": 2 * T * d + 4 * T * K * n + 2 * T * K * d,
        "scattermoe": 2 * T * d + 8 * T * K * n + 2 * T * K * d,  # silu(gate) is not in the paper's
        "scattermoe_style": 2 * T * d + 6 * T * K * n + 2 * T * K * d,
        "standard_style": 2 * T * d + 6 * T * K * n + 4 * T * K * d,
        "megablocks": 2 * T * d + 4 * T * K * n + 4 * T * K * d,
        "deepgemm_pp": 2 * T * d + 4 * T * K * n + 2 * T * K * d,
    }
    assert {name: impls.load(name).properties.held_bytes(shape, 2) for name in formulas} == formulas


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("name", STYLES)
def test_a_style_runs_in_the_family_that_is_asked_for(name, family):
    impl_class = impls.load(name)
    assert impl_class.KNOBS == {"knobs.family"}
    p = point(name, "experts", "zipf", (40, 32, 16, 12, 3), "fp32")
    asked = [p.model_copy(update={"knobs": p.knobs.model_copy(update={"family": f})}) for f in ("hopper", family)]
    assert "family is 'hopper'" in impl_class.supports(asked[0], CPU)
    assert impl_class.supports(asked[1], CPU) is None
    check(impl_class, asked[1])
    impl = impl_class(problem_of(p), asked[1])
    assert impl.family == family and "not the package" in impl.note
