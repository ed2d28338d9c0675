"""Parametrization with products of values, of which few cases run where a case is slow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

Axes = dict[str, Sequence]
Place = tuple[int, ...]  # of a case in a product: the index of each axis' value

both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def covering(together: int, axes: Axes, most: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test with the product of its axes, most of it marked exhaustive.

    The cases without that mark have every `together` values of different axes in one case: 1 each value, 2 each pair;
    among cases that add as much, those with the values that were taken least.

    Args:
        axes: values by the name of their argument; by several names, between commas, tuples.
        most: the same number for all cases together, in place of the whole product; 0 for that.
    """
    product = _product(axes)
    quick = few(together, product)
    cases = [
        pytest.param(*_values(axes, place), marks=() if place in quick else pytest.mark.exhaustive)
        for place in (sorted(few(most, product) | quick) if most else product)
    ]
    return pytest.mark.parametrize(", ".join(axes), cases)


def on_devices(axes: Axes, *, cpu: Axes | None = None, together: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test with a device and the product of its axes: all of it on a GPU, a covering part on the CPU.

    Args:
        cpu: values of some axes on the CPU, where they differ.
        together: how many values must meet in a case on the CPU, see `covering`.
    """
    small = axes | (cpu or {})
    cases = [("cpu", *_values(small, place)) for place in sorted(few(together, _product(small)))]
    cases += [pytest.param("cuda", *_values(axes, place), marks=pytest.mark.gpu) for place in _product(axes)]
    return pytest.mark.parametrize(", ".join(("device", *axes)), cases)


def _product(axes: Axes) -> list[Place]:
    return list(itertools.product(*(range(len(values)) for values in axes.values())))


def _values(axes: Axes, place: Place) -> Iterator:
    for (name, values), at in zip(axes.items(), place, strict=True):
        yield from values[at] if "," in name else (values[at],)


def few(together: int, places: list[Place]) -> set[Place]:
    """Few of the places, in which every `together` indices that meet in one of all places meet."""
    meetings = {place: frozenset(itertools.combinations(enumerate(place), together)) for place in places}
    missing, kept, taken = set().union(*meetings.values()), set(), Counter()
    while missing:
        place = max(meetings, key=lambda p: (len(meetings[p] & missing), -sum(taken[at] for at in enumerate(p))))
        kept.add(place)
        taken.update(enumerate(place))
        missing -= meetings[place]
    return kept
