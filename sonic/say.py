"""Lines for the reader of a command, who may leave early (`| head`): the command goes on without its reader."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str = "", file: TextIO | None = None) -> None:
    """Prints a line at once, to stdout or `file`. When its reader has left, this and all later output goes nowhere."""
    stream = file or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
