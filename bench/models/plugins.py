"""Plugins that engines load from this checkout: seeded weights, drawn experts, filled caches.

    PYTHONPATH=CHECKOUT python -m bench.models.plugins seeded,filled_caches -- vllm serve MODEL --load-format seeded

runs a command whose processes have these plugins. The commands of bench.servers do the same for their servers. Engines
find plugins by entry points, so each gets a distribution without files that exists meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
VLLM, SGLANG = "vllm.general_plugins", "sglang.srt.plugins"
PLUGINS = {
    "seeded": {VLLM: "bench.models.seeded:register_vllm", SGLANG: "bench.models.seeded:register_sglang"},
    "drawn_experts": {SGLANG: "bench.models.drawn_experts:register"},
    "filled_caches": {VLLM: "bench.models.filled_caches:register"},
}


@contextmanager
def plugins(names: Iterable[str]) -> Iterator[dict[str, str]]:
    """The environment of processes that find these plugins. Raises ValueError for unknown names."""
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in PLUGINS]:
        raise ValueError(f"plugins: wanted some of {', '.join(PLUGINS)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="etap-plugins-") as folder:
        for name in names:
            distribution = Path(folder) / f"{name}-0.dist-info"
            distribution.mkdir()
            (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            groups = (f"[{group}]\n{name} = {function}\n" for group, function in PLUGINS[name].items())
            (distribution / "entry_points.txt").write_text("".join(groups))
        path = [folder, str(CHECKOUT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        yield {"PYTHONPATH": os.pathsep.join(path)} if names else {}


if __name__ == "__main__":
    with plugins(sys.argv[1].split(",")) as environment:
        command = sys.argv[3:] if sys.argv[2:3] == ["--"] else sys.argv[2:]
        sys.exit(subprocess.run(command, env={**os.environ, **environment}).returncode)
