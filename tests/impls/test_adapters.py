"""Every adapter computes the same layer: output and all gradients, canonical layouts, on the routing that it names."""

import enum
import functools
import importlib
import re
import subprocess
import sys
import types
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from sonic import impls, reference
from sonic.impls import _common, cublas_bmm, scattermoe, sonicmoe_official, torch_grouped_mm, torch_grouped_mm_compiled
from sonic.problem import Problem
from sonic.record import KERNEL_OPS, Op, Point, Routing, ShapeSpec

CPU = torch.device("cpu")
# `sonic` itself is tested beside its layer, in the process that interprets its kernels.
NAMES = [name for name in impls.names() if name != "sonic"]

CASES = [
    pytest.param("layer", "learned", (40, 32, 16, 8, 2), id="layer"),
    pytest.param("layer", "learned", (33, 24, 40, 5, 5), id="layer-K_is_E"),
    pytest.param("layer", "learned", (0, 16, 8, 4, 2), id="layer-no_token"),
    pytest.param("layer", "learned", (1, 16, 8, 4, 1), id="layer-one_token"),
    pytest.param("layer", "learned", (9, 21, 13, 4, 2), id="layer-unaligned"),
    pytest.param("experts", "zipf", (40, 32, 16, 12, 3), id="zipf"),
    pytest.param("experts", "hot", (30, 32, 16, 64, 1), id="hot-empty_experts"),
    pytest.param("experts", "balanced", (40, 32, 16, 10, 3), id="balanced"),
    pytest.param("experts", "balanced", (0, 32, 16, 10, 3), id="balanced-no_token"),
]


def point(name: str, op: str, distribution: str, shape: tuple[int, ...], dtype: str = "bf16", mode="fwd_bwd") -> Point:
    sizes = ShapeSpec(**dict(zip("TdnEK", shape, strict=True)))
    routing = Routing(distribution=distribution)
    return Point(sweep="test", impl=name, op=op, mode=mode, dtype=dtype, shape=sizes, routing=routing)


def problem_of(p: Point) -> Problem:
    return Problem(p.shape.sizes(), p.routing, p.dtype, CPU, p.seed)


def check(impl_class: type, p: Point) -> None:
    """One training step of the adapter against fp64, then what `zero_grad` leaves."""
    impl = impl_class(problem_of(p), p)
    problem = impl.problem
    before = problem.fingerprint()
    out = impl.forward()
    assert out.shape == (p.shape.T, p.shape.d) and out.dtype == problem.dtype
    out.backward(problem.do_Td)
    got = reference.short_names(out.detach(), impl.grads())
    assert set(got) == {"o", "dx", "dw1", "dw2", "drouter" if p.op == "layer" else "ds"}
    errors, yardsticks = reference.twin_errors(got, problem, p.op)
    errors |= reference.full_errors(got, problem, p.op, yardsticks)
    assert reference.failures(errors) == [], errors
    assert problem.fingerprint() == before
    impl.zero_grad()
    assert all(grad is None for grad in impl.grads().values())
    with torch.no_grad():
        assert not impl.forward().requires_grad


def runnable() -> list:
    """All adapters x cases x dtypes that this machine and the adapter can run, with readable ids."""
    found = []
    for name in NAMES:
        impl_class = impls.load(name)
        if impl_class.available() is not None:
            continue
        for case in CASES:
            for dtype in ("bf16", "fp32", "fp64"):
                p = point(name, *case.values, dtype)
                if p.op in impl_class.OPS and impl_class.supports(p, CPU) is None:
                    found.append(pytest.param(impl_class, p, id=f"{name}-{case.id}-{dtype}"))
    return found


@pytest.mark.parametrize(("impl_class", "p"), runnable())
def test_an_adapter_agrees_with_fp64(impl_class, p):
    check(impl_class, p)


@pytest.mark.parametrize("name", impls.names())
def test_an_adapter_describes_itself(name):
    impl_class = impls.load(name)
    allowed = set(Op.__args__)
    assert impl_class.OPS and set(impl_class.OPS) <= allowed
    # one kernel alone is checked by the adapter itself
    assert not set(impl_class.OPS) & set(KERNEL_OPS) or callable(getattr(impl_class, "check", None))
    assert all(knob.split(".")[0] in ("knobs", "tile") for knob in impl_class.KNOBS)
    reason = impl_class.available()
    assert reason is None or name in reason
    assert reason is not None or impl_class.version()
    refusal = impl_class.supports(point(name, "experts", "balanced", (16, 16, 16, 8, 2), "fp8"), CPU)
    assert refusal is not None and ("fp8" in refusal or "device" in refusal)


def test_names_need_no_torch():
    code = "import sys; from sonic import impls; print(*impls.names()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch_loop" in done.stdout and "_common" not in done.stdout


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="impl is 'scater'; known implementations: .*scattermoe, .*torch_loop"):
        impls.load("scater")


@pytest.mark.parametrize("layout", cublas_bmm.LAYOUTS)
def test_the_bound_is_right_in_both_layouts(layout, monkeypatch):
    monkeypatch.setattr(cublas_bmm, "LAYOUTS", (layout,))
    p = point("cublas_bmm", "experts", "balanced", (40, 32, 16, 10, 3))
    check(cublas_bmm.Impl, p)
    impl = cublas_bmm.Impl(problem_of(p), p)
    assert layout in impl.note
    assert impl.problem.counts_E.tolist() == [12] * 10
    assert all(len(set(row)) == 3 for row in impl.problem.ids_TK.tolist())


@pytest.mark.parametrize(
    ("distribution", "shape", "reason"),
    [
        ("uniform", (40, 32, 16, 10, 3), "routing.distribution is 'uniform'"),
        ("balanced", (41, 32, 16, 10, 3), r"T\*K is 123 and shape.E is 10"),
    ],
)
def test_the_bound_needs_equal_counts(distribution, shape, reason):
    refusal = cublas_bmm.Impl.supports(point("cublas_bmm", "experts", distribution, shape), CPU)
    assert refusal is not None and re.match(reason, refusal)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((8, 20, 16, 4, 2), "bf16", "shape.d is 20; grouped_mm needs multiples of 8 in bf16"),
        ((8, 16, 12, 4, 2), "fp16", "shape.n is 12"),
        ((8, 20, 12, 4, 2), "fp32", None),
        ((8, 16, 16, 4, 2), "fp64", "dtype is 'fp64'"),
    ],
)
def test_grouped_mm_says_what_it_needs(shape, dtype, reason):
    refusal = torch_grouped_mm.Impl.supports(point("torch_grouped_mm", "layer", "learned", shape, dtype), CPU)
    assert (refusal is None) if reason is None else reason in refusal


@pytest.mark.parametrize(("op", "distribution"), [("layer", "learned"), ("experts", "zipf")])
def test_grouped_mm_compiles_without_a_graph_break(op, distribution, monkeypatch):
    """Traced and differentiated by the compiler, run eagerly: what Inductor makes of it is for a GPU to show."""
    traced = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch_grouped_mm_compiled, "compiled", lambda f: traced(f, fullgraph=True, dynamic=False))
    p = point("torch_grouped_mm_compiled", op, distribution, (40, 32, 16, 8, 2))
    assert "cuda" in torch_grouped_mm_compiled.Impl.supports(p, CPU)
    check(torch_grouped_mm_compiled.Impl, p)


def test_a_function_is_compiled_once_and_may_recompile_often():
    def twice(x):
        return 2 * x

    assert _common.compiled(twice) is _common.compiled(twice)
    import torch._dynamo.config

    assert torch._dynamo.config.recompile_limit == torch._dynamo.config.accumulated_recompile_limit == 1 << 16


class FakeGLUMLP(torch.nn.Module):
    """Stands for ScatterMoE's module: same constructor, parameters, call and weight order (up rows first)."""

    def __init__(self, d, n, E, K):
        super().__init__()
        self.experts, self.output_experts = torch.nn.Module(), torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(torch.empty(E, 2 * n, d))
        self.output_experts.weight = torch.nn.Parameter(torch.empty(E, d, n))

    def forward(self, x, gates, ids):
        assert ids.dtype == torch.int64 and gates.dtype == x.dtype
        out = torch.zeros_like(x)
        for e, (w1, w2) in enumerate(zip(self.experts.weight, self.output_experts.weight, strict=True)):
            token, slot = torch.where(ids == e)
            up, gate = F.linear(x[token], w1).chunk(2, dim=-1)
            out = out.index_add(0, token, F.linear(F.silu(gate) * up, w2) * gates[token, slot, None])
        return out


@pytest.mark.parametrize(("op", "distribution"), [("layer", "learned"), ("experts", "zipf")])
def test_scattermoe_gets_its_own_weight_order(op, distribution, monkeypatch):
    ops = types.SimpleNamespace(ALLOW_TF32=True)
    modules = {
        "scattermoe": types.ModuleType("scattermoe"),
        "scattermoe.kernels": types.SimpleNamespace(ops=ops),
        "scattermoe.kernels.ops": ops,
        "scattermoe.mlp": types.SimpleNamespace(GLUMLP=FakeGLUMLP),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    check(scattermoe.Impl, point("scattermoe", op, distribution, (40, 32, 16, 8, 2), "fp32"))
    assert ops.ALLOW_TF32 is False
    assert "cuda" in scattermoe.Impl.supports(point("scattermoe", op, distribution, (8, 16, 16, 4, 2)), CPU)


def test_a_version_without_metadata_is_a_hash_of_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "scattermoe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scattermoe", raising=False)
    importlib.invalidate_caches()
    assert scattermoe.Impl.available() is None
    first = scattermoe.Impl.version()
    (package / "mlp.py").write_text("x = 1")
    assert scattermoe.Impl.version() != first and len(first) >= 8


class FakeActivation(enum.Enum):
    SWIGLU = "swiglu"


class FakeGemmConfig(NamedTuple):
    """QuACK's configuration: its fields in their order, without those that the adapter leaves alone."""

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1


def fake_experts(x, scores, token, expert, w1, b1, w2, b2, E, stream, activation_type, is_inference_mode_enabled, **kw):
    """Stands for `moe_general_routing_inputs`: w1 (2n, d, E) and w2 (d, n, E) as views, sorted tokens, fp32 scores."""
    assert kw == {"concat_layout": True} and b1 is None and b2 is None and activation_type is FakeActivation.SWIGLU
    assert is_inference_mode_enabled is not torch.is_grad_enabled()
    assert w1.permute(2, 0, 1).is_contiguous() and w2.permute(2, 0, 1).is_contiguous() and E == w2.shape[2]
    assert token.dtype == expert.dtype == torch.int32 and scores.dtype == torch.float32 and scores.ndim == 1
    assert bool((token.diff() >= 0).all()) and token.shape == expert.shape == scores.shape
    out = torch.zeros_like(x)
    for e in range(E):
        (row,) = torch.where(expert == e)
        gate, up = F.linear(x[token[row]], w1[:, :, e]).chunk(2, dim=-1)
        out = out.index_add(0, token[row], F.linear(F.silu(gate) * up, w2[:, :, e]) * scores[row, None])
    return out, expert.bincount(minlength=E)


def fake_layer(x, router_w, w1, b1, w2, b2, K, stream, **options):
    """Stands for `moe_TC_softmax_topk_layer`."""
    logits = F.linear(x, router_w)
    top, ids = logits.topk(K, dim=-1)
    token = torch.arange(len(x), dtype=torch.int32).repeat_interleave(K)
    routing = top.float().softmax(dim=-1).flatten(), token, ids.flatten().int()
    out, counts = fake_experts(x, *routing, w1, b1, w2, b2, router_w.shape[0], stream, **options)
    return out, logits, counts


@pytest.fixture
def official(monkeypatch):
    """Stands for sonic-moe and QuACK, on a Hopper; the module that holds QuACK's tuners."""
    tuners = {
        name: types.SimpleNamespace(configs=[f"{name} {i}" for i in range(22)], cache={})
        for name in sonicmoe_official.TUNERS
    }
    gemms = types.SimpleNamespace(**tuners, default_config=lambda device: FakeGemmConfig(is_dynamic_persistent=False))
    modules = {
        "sonicmoe": types.SimpleNamespace(
            moe_general_routing_inputs=fake_experts, moe_TC_softmax_topk_layer=fake_layer
        ),
        "sonicmoe.enums": types.SimpleNamespace(ActivationType=FakeActivation),
        "quack": types.SimpleNamespace(gemm_interface=gemms),
        "quack.gemm_interface": gemms,
        "quack.autotuner": types.SimpleNamespace(AutotuneConfig=types.SimpleNamespace),
        "quack.gemm_config": types.SimpleNamespace(GemmConfig=FakeGemmConfig),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("QUACK_COMPILE_WORKERS", "1")
    monkeypatch.delenv("SONIC_TUNE", raising=False)
    return gemms


@pytest.mark.parametrize(("op", "distribution"), [("layer", "learned"), ("experts", "zipf")])
def test_sonicmoe_official_reads_our_weights_where_they_lie(op, distribution, official):
    p = point("sonicmoe_official", op, distribution, (40, 32, 16, 8, 2), "fp32")
    check(sonicmoe_official.Impl, p)
    assert sonicmoe_official.Impl(problem_of(p), p).note == "tuner cut to 4 configs; concat_layout=True"


@pytest.mark.parametrize(("E", "K", "own"), [(8, 2, True), (12, 2, False), (64, 17, False)])
def test_sonicmoe_official_says_whose_top_k_ran(E, K, own, official):
    for op, distribution in (("layer", "learned"), ("experts", "uniform")):
        p = point("sonicmoe_official", op, distribution, (9, 16, 8, E, K), "fp32")
        assert ("torch's top-K" in sonicmoe_official.Impl(problem_of(p), p).note) is (op == "layer" and not own)


def test_sonicmoe_official_gives_the_tuners_the_list_that_was_asked_for(official, monkeypatch):
    p = point("sonicmoe_official", "experts", "uniform", (9, 16, 8, 8, 2), "fp32")
    tuners = [getattr(official, name) for name in sonicmoe_official.TUNERS]
    every = [tuner.configs for tuner in tuners]

    def lists(tune):
        monkeypatch.setenv("SONIC_TUNE", tune)
        note = sonicmoe_official.Impl(problem_of(p), p).note
        return note.partition(";")[0], [tuner.configs for tuner in tuners]

    cut = [FakeGemmConfig(m, n, pingpong, False, *cluster) for m, n, pingpong, *cluster in sonicmoe_official.CUT]
    assert lists("full") == ("tuner over all configs", every)
    for tuner in tuners:
        tuner.cache["shape"] = "a choice among all"
    note, found = lists("cached")
    assert note == "tuner cut to 4 configs" and all([c.config for c in configs] == cut for configs in found)
    assert all(tuner.cache == {} for tuner in tuners)
    for tuner in tuners:
        tuner.cache["shape"] = "a choice among four"
    assert lists("cached") == (note, found) and all(tuner.cache for tuner in tuners)
    note, found = lists("off")
    assert note == "tuner off, QuACK's default config"
    assert all([c.config for c in configs] == [FakeGemmConfig(128, 192, True, False, 2, 1)] for configs in found)
    assert lists("full") == ("tuner over all configs", every)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert lists("cached") == ("tuner over all configs", every)


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "reason"),
    [
        ((8, 16, 16, 4, 2), "bf16", (9, 0), None),
        ((8, 16, 16, 4, 2), "fp16", (10, 0), None),
        ((8, 16, 16, 4, 2), "bf16", (8, 6), "compute capability is 8.6; its kernels need 9.0"),
        ((8, 20, 16, 4, 2), "bf16", (9, 0), "shape.d is 20; its kernels need multiples of 8"),
        ((8, 16, 12, 4, 2), "bf16", (9, 0), "shape.n is 12"),
        ((0, 16, 16, 4, 2), "bf16", (9, 0), "shape.T is 0"),
        ((1 << 20, 4096, 16, 4, 1), "bf16", (9, 0), r"T*K*d is 4294967296"),
        ((8, 16, 16, 4, 2), "fp32", (9, 0), "dtype is 'fp32'; allowed: bf16, fp16"),
    ],
)
def test_sonicmoe_official_says_what_it_needs(shape, dtype, capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    p = point("sonicmoe_official", "layer", "learned", shape, dtype)
    refusal = sonicmoe_official.Impl.supports(p, torch.device("cuda"))
    assert (refusal is None) if reason is None else reason in refusal
    assert "device is 'cpu'" in sonicmoe_official.Impl.supports(p, CPU)


def test_sonicmoe_official_names_the_missing_part_and_two_versions(monkeypatch):
    present = {"sonicmoe", "quack"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in present else None)
    assert "'nvidia-cutlass-dsl', which is not installed" in sonicmoe_official.Impl.available()
    present.add("cutlass")
    assert sonicmoe_official.Impl.available() is None
    monkeypatch.setattr(importlib.metadata, "version", {"sonic-moe": "0.1.2.post1", "quack-kernels": "0.3.11"}.get)
    assert sonicmoe_official.Impl.version() == "sonicmoe-0.1.2.post1+quack-0.3.11"
