"""torch.cuda on a machine without a GPU answers as an H20 would; every Python of the contract tests imports this.

Only questions are answered, so all decisions are SGLang's, and whatever uses a device fails.
"""

import importlib.abc
import importlib.util
import sys
import types

MULTIPROCESSORS = 78
MEMORY_BYTES = 96 * 2**30
CAPABILITY = (9, 0)


def answer(cuda) -> None:
    """Put the answers into torch.cuda."""
    properties = types.SimpleNamespace(
        name="fake H20",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        multi_processor_count=MULTIPROCESSORS,
        is_integrated=False,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "empty_cache": None,
        "set_device": None,
        "synchronize": None,
    }
    for name, value in answers.items():
        setattr(cuda, name, lambda *arguments, _value=value, **options: _value)


class _AnswerOnImport(importlib.abc.MetaPathFinder):
    """Imports torch.cuda as ever and then puts the answers in: importing torch here would slow every Python down."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            answer(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AnswerOnImport())
