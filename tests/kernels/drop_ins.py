"""What the tests of other libraries' calls on ETAP share."""

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
