"""The shipped configurations of servers hold what their comments promise, by `etap plan`."""

import re

import pytest

from etap_backend.config_list import FOLDER
from etap_backend.plan.deployment import Deployment, cache_named
from etap_backend.plan.gpu import read_gpu
from etap_backend.plan.memory import RESERVE_BYTES, memory_of
from etap_backend.plan.model import read_model

GPUS = {"96g": "H20-96G", "141g": "H20-141G"}
SMOKE = {"DeepSeek-V2-Lite-Chat": "deepseek-v2-lite"}
FILES = [path for engine in ("vllm", "sglang") for path in sorted((FOLDER / engine).glob("*.yaml"))]


def settings_of(path) -> dict[str, str]:
    return dict(re.findall(r"^ *([\w-]+): (.+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_two_requests_of_the_greatest_length_fit(path):
    """SGLang's share is of weights and cache alone: what is left of the memory must do for everything else."""
    settings, in_vllm = settings_of(path), path.parent.name == "vllm"
    gpu = next((read_gpu(name) for key, name in GPUS.items() if key in path.stem), read_gpu("H100"))
    name = settings["model" if in_vllm else "model-path"].rpartition("/")[2]
    model = read_model(SMOKE.get(name, name))
    tp = int(settings.get("tensor-parallel-size" if in_vllm else "tp-size", 1))
    share = float(settings["gpu-memory-utilization" if in_vllm else "mem-fraction-static"])
    on = Deployment(
        gpus=tp,
        tp=tp,
        dcp=int(settings.get("decode-context-parallel-size" if in_vllm else "dcp-size", 1)),
        cache=cache_named(settings.get("kv-cache-dtype", "auto"), model),
        context=int(settings["max-model-len" if in_vllm else "context-length"]),
        batch=2,
        s_q=2 if "-mtp" in path.stem else 1,
        utilization=share,
    )
    on.check(model)
    memory = memory_of(model, gpu, on)
    if in_vllm:
        assert memory.fits
    else:
        assert memory.usable - memory.weights >= memory.cache_wanted + memory.state
        assert memory.total * (1 - share) >= RESERVE_BYTES
    command = "vllm serve" if in_vllm else "python -m sglang.launch_server"
    assert f"{command} --config configs/{path.parent.name}/{path.name}" in path.read_text()


def test_both_engines_have_the_same_deployments():
    vllm, sglang = ({path.name for path in (FOLDER / engine).glob("*.yaml")} for engine in ("vllm", "sglang"))
    assert vllm == sglang and len(vllm) == 16
