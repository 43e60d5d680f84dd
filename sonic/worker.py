"""The process that measures: reads points as JSON lines from stdin, answers each with an `Outcome` on stdout.

  python -m sonic.worker             until EOF, answer lines such as {"cmd": "describe"} and
                                     {"cmd": "measure", "point": {...}, "settings": {...}}
  python -m sonic.worker --describe  print the device and what every implementation can do here, and exit

Replies travel on a private duplicate of stdout, and stdout itself becomes stderr, so that a package's prints cannot
break the protocol. A point that raises is a row, never the end of the sweep; only after a fault that may have spoilt
the CUDA context does the process leave, so that the parent starts a fresh one. When a point was measured but its last
step left the process unfit, it replaces itself, which the parent does not notice.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from typing import IO, Any, Literal

# Inductor would otherwise start a pool of compiling processes, which live on beside the measurement.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import triton

from sonic import counters, impls, measure, reference, routers
from sonic.problem import Problem
from sonic.record import LAYER_OPS, Outcome, Point, Settings
from sonic.shapes import gpu_slug

REASON_LINES = 6
REASON_LENGTH = 1500


def device() -> torch.device:
    """The first visible CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe() -> dict[str, Any]:
    """The device, versions, the timing method, and for each implementation whether it runs here, its knobs and ops."""
    where = device()
    cuda = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if cuda else None
    return {
        "device": {
            "gpu": gpu_slug(properties.name) if cuda else "cpu",
            "name": properties.name if cuda else platform.processor() or platform.machine(),
            "cc": [properties.major, properties.minor] if cuda else None,
            "sms": properties.multi_processor_count if cuda else None,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "method_version": measure.METHOD_VERSION,
        "impls": {name: _describe_impl(name) for name in impls.names()},
    }


def _describe_impl(name: str) -> dict[str, Any]:
    try:
        impl = impls.load(name)
        reason = impl.available()
        version = impl.version() if reason is None else ""
        knobs, ops = sorted(impl.KNOBS), sorted(impl.OPS)
    except Exception as error:
        reason, version, knobs, ops = f"its adapter failed: {type(error).__name__}: {error}", "", [], []
    return {"available": reason is None, "reason": reason, "version": version, "knobs": knobs, "ops": ops}


@dataclass
class Served:
    """An answer, and whether the process may go on to the next point."""

    outcome: Outcome
    fit: bool = True


def serve_point(point: Point, settings: Settings) -> Served:
    """Measures one point; every exception becomes an outcome with a status and a reason."""
    try:
        served = _measured(point, settings)
    except Exception as error:
        served = _fault(error)
    # The exception's frames held the point's tensors; they are gone by now.
    gc.collect()
    if served.fit and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return Served(_fault(error).outcome, fit=False)
    if settings.counters and served.outcome.status == "ok":
        served.outcome = _with_counters(point, served.outcome)
    return served


def _with_counters(point: Point, outcome: Outcome) -> Outcome:
    """The outcome with what the card counted of one more call, this process's own tensors being gone."""
    if device().type != "cuda":
        reading = counters.Reading("missing", "there is no GPU")
    else:
        reading = counters.read(point)
    told = [outcome.note, f"counters {reading.status}: {reading.reason}" if reading.reason else None]
    kernels = counters.on_kernels(outcome.kernels, reading.launches) if outcome.kernels else outcome.kernels
    note = "; ".join(text for text in told if text) or None
    return outcome.model_copy(update={"counters": counters.total(reading), "kernels": kernels, "note": note})


def _fault(error: Exception) -> Served:
    """Sorts an exception into oom, out_of_resources, unavailable (a package with a missing part) or failed.

    An error of CUDA's that is not one of the first two makes the process unfit.
    """
    name, text = type(error).__name__, str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in text:
        return Served(Outcome(status="oom", reason=text.splitlines()[0][:REASON_LENGTH] if text else name))
    if any(kind.__name__ == "OutOfResources" for kind in type(error).__mro__) or "out of resource" in text:
        return Served(Outcome(status="out_of_resources", reason=text[:REASON_LENGTH]))
    if isinstance(error, ImportError):
        return Served(Outcome(status="unavailable", reason=f"{name}: {text}"[:REASON_LENGTH]))
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    reason = "\n".join(lines[-REASON_LINES:])[-REASON_LENGTH:]
    spoilt = torch.cuda.is_available() and any(word in text for word in ("CUDA", "CUBLAS", "cuBLAS", "illegal"))
    return Served(Outcome(status="failed", reason=reason), fit=not spoilt)


def _measured(point: Point, settings: Settings) -> Served:
    where = device()
    impl_class = impls.load(point.impl)
    for status, reason in (
        ("unavailable", impl_class.available()),
        ("unsupported", refusal(impl_class, point, where)),
    ):
        if reason is not None:
            return Served(Outcome(status=status, reason=reason))
    os.environ["SONIC_TUNE"] = settings.tune  # read by kernels that choose their tiles at the first call
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32, in references and implementations alike
    run = _layer_point if point.op in LAYER_OPS else _kernel_point
    return run(impl_class, point, settings, where)


def refusal(impl_class: type, point: Point, where: torch.device) -> str | None:
    """Why an implementation that is installed does not run a point; None when it does."""
    if point.op not in impl_class.OPS:
        return f"op is {point.op!r}; {point.impl} runs: {', '.join(sorted(impl_class.OPS))}"
    if point.op == "layer" and point.routing.distribution != "learned":
        return (
            f"routing.distribution is {point.routing.distribution!r}; op=layer times its own router, "
            "so only 'learned' fits (use op=experts)"
        )
    if (reason := _routing_refusal(impl_class, point)) is not None:
        return reason
    if point.op not in LAYER_OPS and point.mode == "fwd_bwd":
        return f"mode is 'fwd_bwd'; op={point.op} times one kernel, so only 'fwd' fits"
    return impl_class.supports(point, where)


def _routing_refusal(impl_class: type, point: Point) -> str | None:
    """Adapters say what they can route: ROUTERS the methods of their own (op=layer; `topk` alone unless named), RAGGED
    whether they take a varying number of experts per token (op=experts)."""
    method, score = point.routing.method, point.routing.score
    own = getattr(impl_class, "ROUTERS", frozenset({"topk"}))
    if point.op == "layer":
        if method not in own:
            return f"routing.method is {method!r}; with op=layer {point.impl} routes by: {', '.join(sorted(own))}"
        if score is not None and own == {"topk"}:
            return f"routing.score is {score!r}; the router of {point.impl} takes a softmax over the top K: null"
    elif point.op == "experts":
        if method in routers.RAGGED and not getattr(impl_class, "RAGGED", False):
            every = [name for name in routers.METHODS if name not in routers.RAGGED]
            return f"routing.method is {method!r}; {point.impl} needs K experts for every token: {', '.join(every)}"
    elif point.op != "routing" and (method != "topk" or score is not None):
        name, value = ("method", method) if method != "topk" else ("score", score)
        rule = "'topk'" if name == "method" else "null"
        return f"routing.{name} is {value!r}; op={point.op} runs with {rule} (op=routing times every router)"
    return None


def _work(impl: Any, problem: Problem, mode: str) -> measure.Work:
    """The timed call: training forward, forward without a graph, or forward and backward from the given dO."""

    def infer() -> torch.Tensor:
        with torch.no_grad():
            return impl.forward()

    if mode == "fwd_infer":
        return measure.Work(infer)
    if mode == "fwd":
        return measure.Work(impl.forward, None, impl.zero_grad)
    return measure.Work(impl.forward, lambda out: out.backward(problem.do_Td), impl.zero_grad)


def work_of(point: Point) -> measure.Work:
    """The call that a point times, on a problem of its own and unchecked: what `sonic.counters` watches."""
    torch.set_float32_matmul_precision("highest")
    problem = Problem(point.shape.sizes(), point.routing, point.dtype, device(), point.seed)
    impl = impls.load(point.impl)(problem, point)
    if point.op in LAYER_OPS:
        return _work(impl, getattr(impl, "problem", problem), point.mode)
    return measure.Work(torch.no_grad()(impl.forward))


@dataclass
class Checked:
    """An implementation on a problem after its first calls: results for the gate, and inputs that it wrote to."""

    impl: Any
    problem: Problem
    work: measure.Work
    got: dict[str, torch.Tensor | None]
    changed: list[str]
    first_call_s: float


def _checked(impl_class: type, problem: Problem, point: Point) -> Checked:
    """Builds the implementation and runs it for the gate: on CUDA once to compile, then into poisoned memory."""
    where = problem.device
    impl = impl_class(problem, point)
    problem = getattr(impl, "problem", problem)
    before = problem.fingerprint()
    work = _work(impl, problem, point.mode)
    first_call_s = _timed_call(work, where) if where.type == "cuda" else 0.0
    measure.poison(where, [t.numel() * t.element_size() for t in (problem.x_Td, problem.w1_E2nd, problem.w2_Edn)])
    out = work.forward()
    if work.backward is not None:
        work.backward(out)
    got = reference.short_names(out.detach(), impl.grads() if work.backward is not None else {})
    work.clear()
    after = problem.fingerprint()
    return Checked(impl, problem, work, got, [name for name in before if before[name] != after[name]], first_call_s)


def _timed_call(work: measure.Work, where: torch.device) -> float:
    """Seconds of one call and of waiting for it; the first call compiles."""
    begin = time.perf_counter()
    work()
    work.clear()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - begin


def _without_tuning(first_calls_s: float, impl: Any) -> float:
    """Seconds of the first calls less those in which the implementation chose its tiles, which are `tune_s`."""
    return max(0.0, first_calls_s - (getattr(impl, "tune_s", None) or 0.0))


def _layer_point(impl_class: type, point: Point, settings: Settings, where: torch.device) -> Served:
    """Both checks of the gate, then memory and times. A shape that is its own twin runs once for both checks."""
    sizes = point.shape.sizes()
    checked = _checked(impl_class, Problem.twin(point, where), point)
    errors, yardsticks = reference.twin_errors(checked.got, checked.problem, point.op)
    compile_s = checked.first_call_s
    if bad := reference.failures(errors):
        return Served(_wrong(errors, bad))
    if checked.problem.shape != sizes:
        del checked
        checked = _checked(impl_class, Problem(sizes, point.routing, point.dtype, where, point.seed), point)
        compile_s += checked.first_call_s
    impl, problem, work = checked.impl, checked.problem, checked.work
    errors |= reference.full_errors(checked.got, problem, point.op, yardsticks)
    errors |= {f"input.{name}": reference.WORST for name in checked.changed}
    del checked
    if bad := reference.failures(errors):
        return Served(_wrong(errors, bad))

    weights = [problem.w1_E2nd, problem.w2_Edn, problem.router_w_Ed, problem.ids_TK, problem.scores_TK]
    weights += impl.weights() if hasattr(impl, "weights") else []
    kept = measure.memory(work, where, problem.x_Td, weights, training=point.mode != "fwd_infer")
    found = measure.times(work, where, settings)
    fields = _fields(impl, found) | {
        "errors": errors,
        "R": problem.R,
        "flops_model": sizes.flops(point.mode, problem.R),
        "held_bytes": kept.held_bytes,
        "held_source": kept.held_source,
        "peak_fwd_bytes": kept.peak_fwd_bytes,
        "peak_bwd_bytes": kept.peak_bwd_bytes,
        "compile_s": _without_tuning(compile_s, impl) if where.type == "cuda" else None,
    }
    return Served(Outcome(status="ok", **fields), fit=not found.poisoned)


def _kernel_point(impl_class: type, point: Point, settings: Settings, where: torch.device) -> Served:
    """One kernel: its own check against its plain-torch twin at sampled rows, then the same times."""
    problem = Problem(point.shape.sizes(), point.routing, point.dtype, where, point.seed)
    with torch.no_grad():
        impl = impl_class(problem, point)
        work = measure.Work(impl.forward)
        compile_s = _timed_call(work, where)
        errors = {name: reference.ratio(value, 1.0) for name, value in impl.check().items()}
        if bad := reference.failures(errors):
            return Served(_wrong(errors, bad))
        found = measure.times(work, where, settings)
    fields = _fields(impl, found) | {
        "errors": errors,
        "R": problem.R,
        "flops_model": getattr(impl, "flops_model", None),
        "compile_s": _without_tuning(compile_s, impl) if where.type == "cuda" else None,
    }
    return Served(Outcome(status="ok", **fields), fit=not found.poisoned)


def _wrong(errors: dict[str, float], bad: list[str]) -> Outcome:
    return Outcome(status="wrong", reason=reference.describe(errors, bad), errors=errors)


def _fields(impl: Any, found: measure.Times) -> dict[str, Any]:
    """Fields of an outcome that times and the adapter's optional members give."""
    notes = [note for note in (getattr(impl, "note", None), *found.notes) if note]
    kernels = found.kernels
    costs = getattr(impl, "kernels_cost", None)
    if kernels and costs:
        kernels = measure.with_costs(kernels, costs)
    bytes_model = getattr(impl, "bytes_model", None)
    return {
        "note": "; ".join(notes) or None,
        "event_us": found.event_us,
        "device_us": found.device_us,
        "span_us": found.span_us,
        "graph_us": found.graph_us,
        "enqueue_us": found.enqueue_us,
        "launches": found.launches,
        "method": found.method,
        "kernels": kernels,
        "clocks": found.clocks,
        "throttled": found.throttled,
        "family": getattr(impl, "family", None),
        "bytes_model": bytes_model() if callable(bytes_model) else None,
        "flops_padded": getattr(impl, "flops_padded", None),
        "tune_s": getattr(impl, "tune_s", None),
        "tuned": getattr(impl, "tuned", None),
    }


def serve(requests: IO[str], replies: IO[str]) -> Literal["eof", "leave", "restart"]:
    """Answers requests line by line until EOF, or until the process is unfit: then it is to leave, or to restart."""
    for line in requests:
        if not line.strip():
            continue
        request = json.loads(line)
        served = None
        if request["cmd"] == "describe":
            answer = json.dumps(describe())
        elif request["cmd"] == "measure":
            point = Point.model_validate_json(json.dumps(request["point"]))
            settings = Settings.model_validate_json(json.dumps(request["settings"]))
            served = serve_point(point, settings)
            answer = served.outcome.model_dump_json()
        else:
            raise ValueError(f"cmd is {request['cmd']!r}; allowed: describe, measure")
        replies.write(answer + "\n")
        replies.flush()
        if served is not None and not served.fit:
            return "restart" if served.outcome.status == "ok" else "leave"
    return "eof"


def main() -> None:
    if not torch.cuda.is_available():
        # One core stays free for the parent: OpenMP threads that spin for a core taken by another make times a
        # hundredfold.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    if sys.argv[1:] == ["--describe"]:
        replies.write(json.dumps(describe()) + "\n")
        replies.flush()
        return
    if sys.argv[1:]:
        raise SystemExit(f"unknown arguments {sys.argv[1:]}; allowed: --describe")
    # What was imported stays: a collection that looks at all of it takes a tenth of a second, and a point makes four.
    gc.freeze()
    end = serve(sys.stdin, replies)
    if end == "restart":
        os.dup2(replies.fileno(), 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if end == "leave":
        # A spoilt CUDA context can hang the interpreter's own clean-up.
        os._exit(1)


if __name__ == "__main__":
    main()
