"""What the plugins for the serving engines share."""

import importlib.metadata

from packaging.specifiers import SpecifierSet

from etap_backend._library import library


def why_unsupported_version(engine: str, package: str, name: str, supported: SpecifierSet) -> str | None:
    """Say why the installed version of an engine cannot run ETAP, or None when it can.

    Args:
        engine: the engine's name, for the text.
        package: its distribution on the package index.
        name: ETAP's name in that engine.
        supported: the versions that can.
    """
    found = importlib.metadata.version(package)
    if supported.contains(found):
        return None
    return f"the attention backend {name} supports {engine} {supported}, this is {engine} {found}"


def why_no_library() -> str | None:
    """Say why the compiled library cannot be loaded, or None when it can; engines drop the text of an ImportError."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None
