"""A child that measures nothing: speaks the protocol of `sonic.worker` and misbehaves on request.

What a point asks is in its routing.seed: 1 an exception, 2 `os._exit(139)`, 3 a hang, 4 garbage, 5 SIGSEGV, 6 garbage
that is JSON, 7 a wrong result, 8 out of resources, 9 a child of its own that outlives it, then death. T >= 4096 runs
out of memory. SONIC_FAKE names a folder: every start and every measured point appends a line to `log` in it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

METHOD = {"version": 1, "timer": "wall", "l2": None, "warmup": 0, "samples": 3}
TAKES_KNOBS = ["tile.m", "tile.n", "tile.k", "tile.stages", "tile.warps", "knobs.gather", "knobs.aggregate"]
ABSENT = {"scattermoe": "scattermoe is not importable here"}


def note(text: str) -> None:
    """Adds a line to the log of the test."""
    if folder := os.environ.get("SONIC_FAKE"):
        with (Path(folder) / "log").open("a") as file:
            file.write(text + "\n")


def describe() -> dict:
    """Every implementation of this package, without importing one."""
    names = sorted(
        path.stem for path in (Path(__file__).parents[1] / "sonic" / "impls").glob("[!_]*.py") if path.stem != "sonic"
    )
    impls = {
        name: {
            "available": name not in ABSENT,
            "reason": ABSENT.get(name),
            "version": os.environ.get("SONIC_FAKE_VERSION", "1"),
            "knobs": TAKES_KNOBS if name == "sonic" else [],
            "ops": ["layer", "experts"],
        }
        for name in ["sonic", *names]
    }
    device = {"gpu": "cpu", "name": "fake", "cc": None, "sms": None, "torch": "0", "triton": "0", "cuda": None}
    return {"device": {**device, "python": "3"}, "method_version": 1, "impls": impls}


def measure(point: dict) -> dict | str:
    """An outcome, or what takes its place."""
    seed, T = point["routing"]["seed"], point["shape"]["T"]
    note(f"measure {point['impl']} {T} {seed}")
    begin = time.monotonic()
    time.sleep(float(os.environ.get("SONIC_FAKE_SLEEP", "0")))
    if seed == 1:
        return {"status": "failed", "reason": "ValueError: no luck"}
    if seed == 2:
        print("about to leave", file=sys.stderr, flush=True)
        os._exit(139)
    if seed == 3:
        time.sleep(1000)
    if seed == 4:
        return "this is no JSON"
    if seed == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 6:
        return {"status": "fine"}
    if seed == 7:
        return {"status": "wrong", "errors": {"full.o": 7.0}, "reason": "full.o is 7.0 times plain torch's error"}
    if seed == 8:
        return {"status": "out_of_resources", "reason": "shared memory: needs 300000, limit 232448"}
    if seed == 9:
        note(f"grandchild {subprocess.Popen(['sleep', '1000']).pid}")
        os._exit(1)
    if T >= 4096:
        return {"status": "oom", "reason": "out of memory"}
    shape = point["shape"]
    note(f"timed {begin} {time.monotonic()}")
    return {
        "status": "ok",
        "family": "triton" if point["impl"] == "sonic" else None,
        "R": T * shape["K"],
        "event_us": [100.0, 120.0, 110.0],
        "flops_model": 18 * T * shape["K"] * shape["n"] * shape["d"],
        "held_bytes": 1 << 20,
        "held_source": "saved_tensors",
        "method": METHOD,
        "errors": {"twin.o": 0.5, "full.o": 1.0},
    }


def main() -> None:
    """Serves until its input ends."""
    if "--describe" in sys.argv:
        print(json.dumps(describe()))
        return
    note(f"start {os.getpid()} interpret={os.environ.get('TRITON_INTERPRET')}")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("a package says hello")
    for line in sys.stdin:
        request = json.loads(line)
        reply = describe() if request["cmd"] == "describe" else measure(request["point"])
        replies.write((reply if isinstance(reply, str) else json.dumps(reply)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
