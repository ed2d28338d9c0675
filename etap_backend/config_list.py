"""`etap configs`: the servers' configurations that come with the package."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
# A wheel has the folder in the package, a source tree beside it.
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())
COMMANDS = {"vllm": "vllm serve --config", "sglang": "python -m sglang.launch_server --config"}


def run(options: object = None) -> int:
    """Print the path of each file under its engine's command; gives 0. Each file's head says what it is for."""
    for engine, command in COMMANDS.items():
        print(f"{command} FILE")
        for path in sorted((FOLDER / engine).glob("*.yaml")):
            print(f"    {path}")
    return 0
