"""The measuring process: its protocol, and what becomes of a point that cannot be measured or goes wrong."""

import io
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from sonic import impls, measure, worker
from sonic.impls import torch_loop
from sonic.record import Outcome, Point, Routing, Settings, ShapeSpec

SETTINGS = Settings(samples=2, warmup_ms=0.0)
SMALL = ShapeSpec(T=20, d=16, n=8, E=4, K=2)


def point(**changes) -> Point:
    return Point(**{"sweep": "test", "impl": "torch_loop", "shape": SMALL, "dtype": "fp32"} | changes)


def outcome(**changes) -> Outcome:
    return worker.serve_point(point(**changes), SETTINGS).outcome


def install(monkeypatch, **members) -> None:
    """Replaces `torch_loop` by a subclass with other members."""
    monkeypatch.setattr(torch_loop, "Impl", type("Impl", (torch_loop.Impl,), members))


def test_the_process_keeps_its_replies_apart_from_prints():
    """A package that prints to stdout, from Python or below it, disturbs nobody."""
    code = (
        "import os; from sonic import worker; from sonic.impls import torch_loop\n"
        "forward = torch_loop.Impl.forward\n"
        "def noisy(self):\n"
        "    print('noise'); os.write(1, b'more noise\\n'); return forward(self)\n"
        "torch_loop.Impl.forward = noisy\n"
        "worker.main()\n"
    )
    measured = json.loads(point().model_dump_json())
    requests = [{"cmd": "describe"}, {"cmd": "measure", "point": measured, "settings": SETTINGS.model_dump()}] * 2
    lines = "\n".join(map(json.dumps, requests)) + "\n"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == 4 and "more noise" in done.stderr
    assert replies[0]["device"]["gpu"] == "cpu" and replies[0]["device"]["cc"] is None
    assert Outcome.model_validate_json(json.dumps(replies[1])).status == "ok"


def test_an_unfit_process_replaces_itself_between_points():
    """The parent sees one process that answers everything, though the first point left it unfit."""
    code = (
        "import os; from sonic import measure, worker\n"
        "times = measure.times\n"
        "def unfit(*args):\n"
        "    found = times(*args); found.notes.append(f'pass {os.environ.get(\"PASS\", 1)}')\n"
        "    found.poisoned = 'PASS' not in os.environ; os.environ['PASS'] = '2'; return found\n"
        "measure.times = unfit\n"
        "worker.main()\n"
    )
    request = {"cmd": "measure", "point": point().model_dump(), "settings": SETTINGS.model_dump()}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    notes = []
    for _ in range(2):
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        notes.append(json.loads(child.stdout.readline())["note"])
    child.stdin.close()
    child.stdout.close()
    assert child.wait(60) == 0
    assert notes == ["pass 1", "pass 2"]


def test_describe_lists_every_implementation():
    told = worker.describe()
    assert told["method_version"] == measure.METHOD_VERSION
    assert set(told["impls"]) == set(impls.names())
    loop = told["impls"]["torch_loop"]
    assert loop == {
        "available": True,
        "reason": None,
        "version": f"torch-{torch.__version__}",
        "knobs": [],
        "ops": ["experts", "layer"],
    }
    assert set(told["device"]) == {"gpu", "name", "cc", "sms", "torch", "triton", "cuda", "python"}
    json.dumps(told)


def test_a_broken_adapter_is_described_not_fatal(monkeypatch):
    def broken():
        raise OSError("libfoo.so is missing")

    install(monkeypatch, available=staticmethod(broken))
    told = worker.describe()["impls"]["torch_loop"]
    assert not told["available"] and "OSError: libfoo.so is missing" in told["reason"]


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 4090 (x)", "nvidia-geforce-rtx-4090-x")]
)
def test_slugs(name, expected):
    assert worker.gpu_slug(name) == expected


@pytest.mark.parametrize("mode", ["fwd", "fwd_infer", "fwd_bwd"])
@pytest.mark.parametrize(("op", "distribution"), [("layer", "learned"), ("experts", "uniform")])
def test_a_point_is_measured(op, distribution, mode):
    found = outcome(op=op, mode=mode, routing=Routing(distribution=distribution))
    assert found.status == "ok", found.reason
    assert len(found.event_us) == 2 and found.method.timer == "wall" and found.family == "torch"
    assert found.R == 40 and found.flops_model == (18 if mode == "fwd_bwd" else 6) * 40 * 16 * 8
    routing = "drouter" if op == "layer" else "ds"
    names = {"o", "dx", "dw1", "dw2"} if mode == "fwd_bwd" else {"o"}
    twin_only = {f"twin.{routing}"} if mode == "fwd_bwd" else set()
    assert set(found.errors) == {f"{check}.{name}" for check in ("twin", "full") for name in names} | twin_only
    if mode == "fwd_infer":
        assert found.held_bytes is None
    else:
        assert found.held_bytes > 20 * 16 * 4 and found.held_source == "saved_tensors"
    assert found.device_us is found.peak_fwd_bytes is found.compile_s is found.clocks is None
    assert Outcome.model_validate_json(found.model_dump_json()) == found


def test_a_shape_larger_than_its_twin_is_run_twice(monkeypatch):
    seen = []

    def count(self, problem, point):
        seen.append(problem.shape.T)
        torch_loop.Impl.__mro__[1].__init__(self, problem, point)

    install(monkeypatch, __init__=count)
    assert outcome(shape=ShapeSpec(T=200, d=16, n=8, E=20, K=2)).status == "ok"
    assert outcome().status == "ok"
    assert seen == [130, 200, 20]


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"impl": "nope"}, "failed", "known implementations"),
        ({"dtype": "fp8"}, "unsupported", "dtype is 'fp8'"),
        ({"op": "up_proj", "mode": "fwd"}, "unsupported", "op is 'up_proj'; torch_loop runs: experts, layer"),
        ({"routing": Routing(distribution="zipf")}, "unsupported", "routing.distribution is 'zipf'"),
        ({"impl": "cublas_bmm"}, "unsupported", "op is 'layer'; cublas_bmm runs: d_input, down_proj, experts"),
    ],
)
def test_what_cannot_run_says_why(changes, status, reason):
    found = outcome(**changes)
    assert found.status == status and reason in found.reason


def test_an_absent_package_is_unavailable(monkeypatch):
    install(monkeypatch, available=staticmethod(lambda: "package 'x' is not installed"))
    assert (outcome().status, outcome().reason) == ("unavailable", "package 'x' is not installed")


class OutOfResources(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "oom", "Tried to allocate 9 GiB"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "can't allocate"),
        (MemoryError(), "oom", "MemoryError"),
        (OutOfResources("Required: 294912, Hardware limit: 232448"), "out_of_resources", "limit: 232448"),
        (ImportError("hub>=1.5 is required"), "unavailable", "hub>=1.5 is required"),
        (ZeroDivisionError("boom"), "failed", "ZeroDivisionError: boom"),
    ],
)
def test_exceptions_become_statuses(monkeypatch, error, status, reason):
    def forward(self):
        raise error

    install(monkeypatch, forward=forward)
    served = worker.serve_point(point(), SETTINGS)
    assert served.outcome.status == status and reason in served.outcome.reason and served.fit


def test_a_cuda_error_ends_the_process_after_its_reply(monkeypatch):
    def forward(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    install(monkeypatch, forward=forward)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(worker, "device", lambda: torch.device("cpu"))
    request = {"cmd": "measure", "point": point().model_dump(), "settings": SETTINGS.model_dump()}
    replies = io.StringIO()
    assert worker.serve(io.StringIO(f"{json.dumps(request)}\n" * 3), replies) == "leave"
    (reply,) = replies.getvalue().splitlines()
    assert json.loads(reply)["status"] == "failed" and "illegal memory access" in json.loads(reply)["reason"]


def _nan_in_the_last_row(self):
    o_Td = self.original()
    return torch.cat([o_Td[:-1], o_Td[-1:] * math.nan])


def _writes_to_its_input(self):
    o_Td = self.original()
    with torch.no_grad():
        self.problem.do_Td[0, 0] += 1
    return o_Td


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda self: self.original() * 1.01, "twin.o"),
        (lambda self: self.original() + 0.01 * self.x_Td.sum(), "twin.dx"),
        (_nan_in_the_last_row, "twin.o"),
        (_writes_to_its_input, "input.do_Td"),
    ],
)
def test_a_wrong_result_is_not_timed(monkeypatch, forward, name):
    install(monkeypatch, forward=forward, original=torch_loop.Impl.forward)
    found = outcome()
    assert found.status == "wrong" and name in found.reason and found.event_us is None
    assert found.errors[name] > 2
    assert Outcome.model_validate_json(found.model_dump_json()) == found


def test_a_result_that_is_wrong_only_at_full_size_is_caught(monkeypatch):
    def forward(self):
        o_Td = self.original()
        return o_Td if o_Td.shape[0] <= 130 else torch.cat([o_Td[:-1], 0 * o_Td[-1:]])

    install(monkeypatch, forward=forward, original=torch_loop.Impl.forward)
    found = outcome(mode="fwd", shape=ShapeSpec(T=1000, d=16, n=8, E=4, K=2))
    assert found.status == "wrong" and "full.o" in found.reason and found.errors["twin.o"] <= 2


def test_a_kernel_point_uses_the_adapters_own_check(monkeypatch):
    members = {
        "OPS": frozenset({"up_proj"}),
        "forward": lambda self: self.x_Td.relu(),
        "check": lambda self: {"h": 0.5, "a": self.ratio},
        "flops_model": 12,
        "ratio": 1.0,
        "note": "kernel",
    }
    install(monkeypatch, **members)
    found = outcome(op="up_proj", mode="fwd", routing=Routing(distribution="uniform"))
    assert found.status == "ok" and found.errors == {"h": 0.5, "a": 1.0} and found.flops_model == 12
    install(monkeypatch, **members | {"ratio": math.inf})
    assert outcome(op="up_proj", mode="fwd").status == "wrong"
    assert outcome(op="up_proj").status == "unsupported"


def test_an_unknown_command_is_an_error():
    with pytest.raises(ValueError, match="cmd is 'dance'; allowed: describe, measure"):
        worker.serve(io.StringIO('{"cmd": "dance"}\n'), io.StringIO())


@pytest.mark.parametrize(
    ("impl", "op", "routing", "text"),
    [
        (
            "torch_grouped_mm",
            "experts",
            {"method": "tr_up"},
            "routing.method is 'tr_up'; torch_grouped_mm needs K experts",
        ),
        ("torch_grouped_mm", "layer", {"method": "laser"}, "with op=layer torch_grouped_mm routes by: topk"),
        ("torch_grouped_mm", "layer", {"score": "sigmoid"}, "routing.score is 'sigmoid'"),
        ("sonic", "router_topk", {"method": "tr_up"}, "routing.method is 'tr_up'; op=router_topk runs with 'topk'"),
    ],
)
def test_a_routing_out_of_reach_is_named(impl, op, routing, text):
    mode = "fwd" if op == "router_topk" else "fwd_bwd"
    found = outcome(impl=impl, op=op, mode=mode, routing=Routing(**routing))
    assert found.status == "unsupported" and text in found.reason


@pytest.mark.parametrize(("op", "method"), [("experts", "tr_up"), ("layer", "token_drop"), ("layer", "grouped")])
def test_the_loop_takes_any_routing(op, method):
    fields = {"tr_up": {"tile": 4}, "token_drop": {"capacity": 0.5}, "grouped": {"groups": 2}}[method]
    assert outcome(op=op, routing=Routing(method=method, **fields)).status == "ok"
