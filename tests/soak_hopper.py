"""Many random routings through the Hopper family, each child process under a watchdog: races and hangs are rare.

`python -m tests.soak_hopper [--cases 1000] [--children 8] [--timeout 120] [--first 0]` needs a card that runs the
family. Every case is a forward and a backward of `sonic.experts`, twice: both must give the same bits, and be the torch
family in fp32 up to the project's tolerance. A case that outlives the timeout is `hung` and its child killed; one at
which a child dies is `crashed`; both name the case, which `--first` and `--cases 1` run again.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sonic import layer, routers
from tests.oracle import DTYPES, LAYER_LIMIT, check, check_equal

ROOT = Path(__file__).parents[1]
#: (d, n, E, K): aligned, not multiples of 64, narrower than any tile, one expert, more experts than rows.
SHAPES = [
    (512, 256, 8, 2), (512, 256, 64, 8), (512, 128, 32, 4), (512, 64, 64, 8), (256, 256, 16, 2), (256, 128, 5, 1),
    (384, 192, 12, 3), (200, 72, 7, 2), (136, 40, 9, 3), (72, 200, 3, 1), (328, 248, 24, 4), (264, 136, 64, 6),
    (8, 8, 4, 2), (64, 8, 16, 4), (8, 256, 5, 5), (504, 24, 48, 8), (64, 64, 1, 1), (128, 64, 2, 2),
    (448, 96, 33, 3), (96, 104, 64, 1), (512, 16, 128, 8), (320, 256, 6, 6), (160, 224, 40, 5), (192, 232, 300, 8),
]  # fmt: skip
ROUTINGS = ("uniform", "zipf", "hot", "one", "empty")
#: Tokens and matrices are compared in parts, among which one wrong block of a kernel stands out.
ROWS = 64
#: Root of the mean square of silu(g) u, and so of Y, for the normal g and u that these inputs give.
Y_SIZE = 0.6


def ids_of(routing: str, T: int, E: int, K: int, draws: torch.Generator) -> torch.Tensor:
    """Expert ids (T, K): `one` gives every token the same K experts, `empty` leaves most experts without rows."""
    if routing in ("one", "empty"):
        used = torch.randperm(E, generator=draws)[: K if routing == "one" else K + E // 8]
        return used[routers.uniform(T, len(used), K, draws)]
    return routers.draw(routing, T, E, K, draws, None)


def run(case: int, family: str, device: str) -> None:
    """AssertionError with what is wrong with a case."""
    d, n, E, K = SHAPES[case % len(SHAPES)]
    chosen = random.Random(case)
    T = chosen.choice((1, chosen.randint(2, 40), chosen.randint(41, 600)))
    routing, w1_layout = chosen.choice(ROUTINGS), chosen.choice(("concat", "interleaved"))
    # a shape keeps its dtype, since each would be compiled
    dtype = DTYPES[("bf16", "fp16")[case % len(SHAPES) % 2]]
    label = f"case {case}: T{T}-K{K}-E{E}-d{d}-n{n} {dtype} {routing} {w1_layout}"
    draws = torch.Generator().manual_seed(case)
    new = lambda *size, scale=1.0: (scale * torch.randn(size, generator=draws)).to(dtype)  # noqa: E731
    x, do = new(T, d), new(T, d)
    w1, w2 = new(E, 2 * n, d, scale=d**-0.5), new(E, d, n, scale=n**-0.5)
    ids = ids_of(routing, T, E, K, draws).to(torch.int32)
    scores = torch.rand(T, K, generator=draws)

    def step(family: str, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Results on the CPU, where comparing them does not wait for a card that many children share."""
        leaves = [t.to(device, t.dtype if t is scores else dtype, copy=True) for t in (x, scores, w1, w2)]
        x_, scores_, w1_, w2_ = (leaf.requires_grad_() for leaf in leaves)
        o = layer.experts(x_, ids.to(device), scores_, w1_, w2_, family=family, w1_layout=w1_layout)
        o.backward(do.to(device, dtype))
        found = {"o": o.detach(), "dx": x_.grad, "ds": scores_.grad, "dw1": w1_.grad, "dw2": w2_.grad}
        return {name: t.cpu() for name, t in found.items()}

    got, again = step(family, device, dtype), step(family, device, dtype)
    want = step("torch", "cpu", torch.float32)
    for name, whole in want.items():
        check_equal(f"{label}, run again", name, again[name], got[name])
        if name == "ds":
            check_ds(label, got[name], whole, d, dtype)
            continue
        parts = got[name].split(1 if name.startswith("dw") else ROWS)
        for i, (ours, theirs) in enumerate(zip(parts, whole.split(len(parts[0])), strict=True)):
            check(label, f"{name}[{i}]", ours, theirs, LAYER_LIMIT[dtype])


def check_ds(label: str, got: torch.Tensor, want: torch.Tensor, d: int, dtype: torch.dtype) -> None:
    """AssertionError unless the dS (T, K) of every `ROWS` tokens is right, measured by what its sums are made of.

    dS = <dO, Y> sums d products and may cancel to next to nothing, which no part so small as one token evens out.
    """
    usual = Y_SIZE * d**0.5
    for i, (ours, theirs) in enumerate(zip(got.split(ROWS), want.split(ROWS), strict=True)):
        size = max(torch.linalg.vector_norm(theirs).item(), usual * theirs.numel() ** 0.5)
        error = torch.linalg.vector_norm(ours - theirs).item() / size
        assert error <= LAYER_LIMIT[dtype], f"{label}: ds[{i}] is off by {error:.2e}, limit {LAYER_LIMIT[dtype]:.0e}"


def serve(cases: Sequence[int], family: str, device: str) -> None:
    """The child: a line when a case begins and one when it ends."""
    torch.set_num_threads(1)  # the children are many
    for case in cases:
        print(json.dumps([case, "begin", ""]), flush=True)
        try:
            run(case, family, device)
        except AssertionError as wrong:
            print(json.dumps([case, "wrong", str(wrong)]), flush=True)
        else:
            print(json.dumps([case, "ok", ""]), flush=True)


class Watched:
    """One child that is killed when it says nothing for `timeout` seconds."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile(mode="w+")
        self._child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.hung = False

    def _kill(self) -> None:
        self.hung = True
        self._child.kill()

    def lines(self) -> Iterator[str]:
        """What it prints, until it ends or is killed."""
        while True:
            timer = threading.Timer(self._timeout, self._kill)
            timer.start()
            line = self._child.stdout.readline()
            timer.cancel()
            if not line:
                break
            yield line
        self._child.stdout.close()
        self._child.wait()

    def last_words(self) -> str:
        self._errors.seek(0)
        return f"exit code {self._child.returncode}: {self._errors.read()[-400:].strip()}"


def outcomes(cases: Sequence[int], command: Sequence[str], timeout: float) -> Iterator[tuple[int, str, str]]:
    """(case, verdict, detail) of every case, in children that get a list of cases as their last argument. What is left
    when one is killed or dies goes to the next."""
    left = list(cases)
    while left:
        child = Watched([*command, ",".join(map(str, left))], timeout)
        for line in child.lines():
            case, verdict, detail = json.loads(line)
            if verdict != "begin":
                left.remove(case)
                yield case, verdict, detail
        if left:
            failed = left.pop(0)
            yield failed, *(("hung", f"no answer in {timeout:g} s") if child.hung else ("crashed", child.last_words()))


def soak(cases: Sequence[int], children: int, command: Sequence[str], timeout: float) -> Counter[str]:
    """How many cases ended how; those that are not ok are printed. A child keeps to its shapes, which it compiles."""
    counts: Counter[str] = Counter()

    def drive(share: list[int]) -> None:
        for case, verdict, detail in outcomes(share, command, timeout):
            counts[verdict] += 1
            if verdict != "ok":
                print(f"{verdict}: case {case}: {detail}", flush=True)

    shares = [[case for case in cases if case % len(SHAPES) % children == i] for i in range(children)]
    threads = [threading.Thread(target=drive, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def child_command(family: str = "hopper", device: str = "cuda") -> list[str]:
    return [sys.executable, "-m", "tests.soak_hopper", "--family", family, "--device", device, "--serve"]


def refusal(family: str, device: str) -> str | None:
    """Why the family cannot run here; None when it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        layer.resolve_family(family, torch.device(device), torch.bfloat16, 64, 64)
    except ValueError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--children", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one case may take")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--family", default="hopper", help="another one tries the soak itself")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve", metavar="CASES", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve([int(case) for case in asked.serve.split(",")], asked.family, asked.device)
        return 0
    if (reason := refusal(asked.family, asked.device)) is not None:
        print(f"nothing to soak: {reason}")
        return 2
    begun = time.monotonic()
    cases = range(asked.first, asked.first + asked.cases)
    counts = soak(cases, asked.children, child_command(asked.family, asked.device), asked.timeout)
    ended = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "wrong", "hung", "crashed"))
    print(f"{len(cases)} cases of family {asked.family}: {ended} ({time.monotonic() - begun:.0f} s)")
    return 0 if counts["ok"] == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
