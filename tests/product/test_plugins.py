"""What the plugins of both engines share: which versions they support, compared as `packaging` compares them."""

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from etap_backend import plugins

SUPPORTED = plugins.Versions("0.26.0", "0.34")
VERSIONS = (
    "0.9.1", "0.25.9", "0.26", "0.26.0", "0.26.0+cu130", "0.26.1.dev5+g0123456.cu130", "0.30.2.post1", "0.33.0rc1",
    "0.33.10", "0.34", "0.34.0", "0.34.1", "1.0.0", "0.99.0",
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_supported_as_its_specifier_says(version):
    assert (version in SUPPORTED) == SpecifierSet(str(SUPPORTED)).contains(version, prereleases=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_its_versions_numbers_three_at_least(version):
    found = plugins.release(version)
    assert len(found) >= 3 and Version(".".join(map(str, found))) == Version(Version(version).base_version)
