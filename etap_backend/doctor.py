"""`etap doctor`: what decoding and the serving engines need, what is missing, and what to do about it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

import etap_backend
from etap_backend import __version__, _library, engine_contract
from etap_backend.limits import why_unsupported
from etap_backend.sglang import versions as sglang
from etap_backend.vllm import versions as vllm

MIN_CUDA = 13000  # as cuDriverGetVersion counts
MIN_DRIVER = 580  # the first driver with CUDA 13
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, which the check of the GPU reports
PROBE_SECONDS = 300
DRIVER_SECONDS = 60
NO_ANSWER = "no answer after"
ASK_DRIVER = """
import ctypes
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
driver.cuDriverGetVersion(ctypes.byref(version))
print(version.value, driver.cuInit(0))
"""
MODULE_VERSION = Path("/proc/driver/nvidia/version")
AS_A_SCRIPT = "import sys; sys.path[:] = filter(None, sys.path)\n"
"""The begin of a probe for a command that, unlike `python -m`, does not import from the working directory."""
SPARSE_MARK, V4_MARK = "etap, sparse attention: ", "etap, DeepSeek-V4: "
ASK = """
try:
    why_not = {expression}
except Exception as error:
    why_not = type(error).__name__ + ": " + str(error)
print("{mark}" + (why_not or "").partition("\\n")[0])
"""
"""The end of a probe; it prints a line with the reason after the mark, or nothing after it where ETAP can run."""
SOURCES = Path(etap_backend.__file__).parent
SPARSE_MODELS = "sparse attention (DeepSeek-V3.2, GLM-5)"
DRIVER_FIRST = "mend the driver first: without it the engine's own libraries may not load"


class Verdict(Enum):
    OK = "ok"
    ABSENT = "not installed"
    OFF = "turned off"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One part's state; `remedy` tells what to do or what is possible, `sparse` which sparse models are served, `hangs`
    that the other checks would hang, too."""

    verdict: Verdict
    found: str
    remedy: str = ""
    sparse: tuple[str, ...] = ()
    hangs: bool = False


@dataclass(frozen=True)
class Plugin:
    """ETAP's plugin in an engine.

    Attributes:
        option: the option that selects ETAP.
        entry_points: the group that the engine reads plugins from.
        allow_list: the environment variable with the names of plugins to load.
        allowed: the names in its value, as the engine reads them; None for all.
        probe: a program that fails, with a line, where ETAP cannot run.
        why_not_sparse, why_not_v4: expressions for the reason why sparse attention and DeepSeek-V4 cannot run, or None.
        sparse, v4: the options that select them.
    """

    engine: engine_contract.Engine
    option: str
    entry_points: str
    allow_list: str
    allowed: Callable[[str], list[str] | None]
    probe: str
    why_not_sparse: str
    sparse: str = ""
    why_not_v4: str = "'it is not served in this engine'"
    v4: str = ""


def _in_sglangs_list(value: str) -> list[str] | None:
    return [name.strip() for name in value.split(",")] if value else None


PLUGINS = (
    Plugin(
        vllm.ENGINE,
        "--attention-backend ETAP",
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        lambda value: value.split(","),
        AS_A_SCRIPT + "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "assert 'ETAP' in AttentionBackendEnum.__members__, 'ETAP is not among the attention backends'\n"
        "from etap_backend.vllm import registration, v4_selection, versions\n"
        "if reason := registration.why_not(sparse=False): raise SystemExit(reason)",
        "registration.why_not(sparse=True) or versions.why_no_indexer()",
        "--kv-cache-dtype auto, bfloat16 or fp8 (stored as fp8_ds_mla)",
        "v4_selection.why_no_layers() or versions.why_no_indexer()",
        "--kv-cache-dtype fp8 (stored as fp8_ds_mla), V4.1 where vLLM has it",
    ),
    Plugin(
        sglang.ENGINE,
        "--attention-backend etap",
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
        _in_sglangs_list,
        "from etap_backend.sglang import registration\n"
        "try: registration.check_plugin()\n"
        "except registration.Unavailable as reason: raise SystemExit(str(reason))",
        "registration.why_unusable(sparse=True)",
        "--kv-cache-dtype auto, bfloat16 or fp8_e4m3",
        "registration.why_no_v4()",
        "--kv-cache-dtype auto or fp8_e4m3",
    ),
)


def check_gpu() -> Finding:
    """Whether every GPU that torch sees can run the kernels."""
    if not torch.cuda.is_available():
        remedy = "run where nvidia-smi lists a Hopper GPU (H100, H200, H20), with a CUDA build of torch"
        return Finding(Verdict.BROKEN, "torch sees no CUDA device", remedy)
    reasons = {}
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        reasons[torch.cuda.get_device_name(index)] = why_unsupported(
            dtype=torch.bfloat16, compute_capability=capability
        )
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if refused:
        return Finding(Verdict.BROKEN, "; ".join(refused), "choose a Hopper GPU (CUDA_VISIBLE_DEVICES)")
    return Finding(Verdict.OK, f"{torch.cuda.device_count()} x {', '.join(reasons)}")


def check_driver() -> Finding:
    """Whether the NVIDIA driver that programs load here supports the CUDA version of the kernels."""
    remedy = f"install the NVIDIA driver, {MIN_DRIVER} or newer"
    try:
        answer = _run_python(ASK_DRIVER, DRIVER_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(
            Verdict.BROKEN,
            f"{NO_ANSWER} {DRIVER_SECONDS} s",
            "reset the GPU or restart the machine; nothing else was checked",
            hangs=True,
        )
    if answer.returncode:
        return Finding(Verdict.BROKEN, "no driver: libcuda.so.1 does not load", remedy)
    version, status = map(int, answer.stdout.split())
    found = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if MODULE_VERSION.is_file() and (module := re.search(r" (\d+[.\d]+) ", MODULE_VERSION.read_text())):
        found += f", kernel module {module[1]}"
    if version < MIN_CUDA:
        return Finding(Verdict.BROKEN, found, f"{remedy}, or its CUDA compatibility package")
    if status not in (0, NO_DEVICE):
        remedy = "restart the machine after an update of the driver; a compatibility package fits some drivers and GPUs"
        return Finding(Verdict.BROKEN, f"{found}: cuInit fails with error {status}", remedy)
    return Finding(Verdict.OK, found)


def check_library() -> Finding:
    """Whether the compiled library exists, loads, and has this package's version."""
    try:
        version = _library.library().abi_version()
    except ImportError as error:
        return Finding(Verdict.BROKEN, str(error))  # with what to do
    path = _library.library_path()
    beside = any(path.is_relative_to(folder) for folder in etap_backend.__path__)
    return Finding(Verdict.OK, f"ABI version {version}, {path}", "" if beside else f"serves the sources in {SOURCES}")


def check_flags() -> Finding:
    """What the environment variables that both plugins read turn on."""
    try:
        values = ", ".join(f"{name}={engine_contract.is_on(name):d}" for name in engine_contract.FLAGS)
    except ValueError as error:
        return Finding(Verdict.BROKEN, str(error))
    words = "the default backend; a dense model's shared prefixes read once; a sparse model's tokens selected"
    return Finding(Verdict.OK, values, words)


def _run_python(program: str, seconds: float) -> subprocess.CompletedProcess:
    """Run a program in another process. Raises TimeoutExpired after so many seconds, whatever goes on running."""
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], **pipes)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # not subprocess.run, which waits for its children, too, and for a driver's call that hangs
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _probe(plugin: Plugin) -> tuple[str | None, tuple[str, ...]]:
    """Why the plugin cannot run, or None with a line on sparse attention and one on DeepSeek-V4.

    It runs in another process: importing an engine takes long, changes the process and may end it.
    """
    asked = {
        SPARSE_MARK: (SPARSE_MODELS, plugin.why_not_sparse, plugin.sparse),
        V4_MARK: ("DeepSeek-V4", plugin.why_not_v4, plugin.v4),
    }
    questions = [ASK.format(expression=expression, mark=mark) for mark, (_, expression, _) in asked.items()]
    program = plugin.probe + "".join(questions)
    try:
        probe = _run_python(program, PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{NO_ANSWER} {PROBE_SECONDS} s", ()
    if probe.returncode:
        return (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1], ()
    lines = []
    for mark, (models, _, how) in asked.items():
        # The output has the engine's own lines too.
        reasons = [line.removeprefix(mark) for line in probe.stdout.splitlines() if line.startswith(mark)]
        lines.append(f"no {models}: {reasons[-1]}" if reasons[-1] else f"{models} too: {how}")
    return None, tuple(lines)


def check_plugin(plugin: Plugin) -> Finding:
    """Whether this engine can run ETAP: installed, entry point known, not turned off, with all that ETAP uses."""
    engine = plugin.engine
    try:
        version = engine.version
    except importlib.metadata.PackageNotFoundError:
        return Finding(Verdict.ABSENT, "", f"pip install '{engine.package}>={engine.oldest}' to serve with it")
    if too_old := engine.why_too_old():
        return Finding(Verdict.BROKEN, too_old, f"pip install '{engine.package}>={engine.oldest}'")
    version += ", tested" if engine.is_tested else f", not tested ({engine} are)"
    if "etap" not in importlib.metadata.entry_points(group=plugin.entry_points).names:
        remedy = "install etap-backend with pip: from a source tree alone its entry points are unknown"
        return Finding(Verdict.BROKEN, f"{version}, no entry point etap in {plugin.entry_points}", remedy)
    value = os.environ.get(plugin.allow_list)
    allowed = None if value is None else plugin.allowed(value)
    if allowed is not None and "etap" not in allowed:
        remedy = f"to turn it on, add etap to {plugin.allow_list} or unset it"
        return Finding(Verdict.OFF, f"{version}, {plugin.allow_list}={value} leaves etap out", remedy)
    reason, sparse = _probe(plugin)
    if reason:
        remedy = f"{engine.name} does not load the plugin here; the reason is in its own words"
        return Finding(Verdict.BROKEN, f"{version}, not usable: {reason}", remedy)
    others = "other plugins' names" + (", or to nothing," if plugin.allowed("") is not None else "")
    remedy = f"{plugin.option} selects it; {plugin.allow_list} set to {others} turns it off"
    return Finding(Verdict.OK, f"{version}, plugin active", remedy, sparse)


def run(options: object = None) -> int:
    """Print each finding as it comes; gives 1 when something is broken, else 0."""
    checks: dict[str, Callable[[], Finding]] = {"driver": check_driver, "GPU": check_gpu, "library": check_library}
    checks["flags"] = check_flags
    engines = {plugin.engine.name: lambda plugin=plugin: check_plugin(plugin) for plugin in PLUGINS}
    checks |= engines
    print(f"etap-backend {__version__} in {SOURCES}, torch {torch.__version__}")
    broken = no_driver = False
    for name, check in checks.items():
        print(f"{name:<9}", end="", flush=True)  # an engine takes half a minute to load
        finding = check()
        broken |= finding.verdict is Verdict.BROKEN
        print(f"{finding.verdict.value:<15}{finding.found}".rstrip())
        no_driver |= name == "driver" and finding.verdict is Verdict.BROKEN
        refused = finding.verdict is Verdict.BROKEN or any(line.startswith("no ") for line in finding.sparse)
        first = DRIVER_FIRST if no_driver and refused and name in engines else ""
        for more in filter(None, (finding.remedy, *finding.sparse, first)):
            print(f"{'':<9}{'':<15}{more}")
        if finding.hangs:
            break
    return int(broken)
