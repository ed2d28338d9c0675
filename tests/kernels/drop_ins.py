"""What the tests of other libraries' calls on ETAP share."""

import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch

both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FP8 = torch.float8_e4m3fn
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 q, fp8": (torch.bfloat16, FP8),
    "fp8": (FP8, FP8),
}
"""Types of queries and cache."""
KV_SCALE, Q_SCALE = 0.0137, 0.021
WILD = 2147480000  # in unused entries of block tables
DOCS = Path(__file__).parents[2] / "docs"


def run_program(program: str) -> str:
    """What a program says in a fork of this process: torch, whose import takes seconds, is there already.

    Modules whose places ETAP takes are not, whatever tests before this one left.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        sys.stdout = sys.stderr = os.fdopen(write, "w")
        for name in [name for name in sys.modules if re.match(r"(flash_mla|flashinfer|flash_attn_interface)\b", name)]:
            del sys.modules[name]
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text
