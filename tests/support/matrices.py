"""Many cases of one test: some of them are in every run, as a diagonal of a matrix; the others have the mark `wide`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest

_PARAM = type(pytest.param())


def diagonal(*dimensions: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """All combinations of the values of several `pytest.mark.parametrize`; most of them have the mark `wide`.

    The others are as many as the longest dimension has values. Each value of each dimension is in one of them, and the
    short dimensions go through their own combinations as far as that number reaches.
    """
    several = [_values(dimension) for dimension in dimensions]
    in_every_run = _places([len(values) for values in several])
    cases = []
    for places in product(*(range(len(values)) for values in several)):
        chosen = [values[place] for values, place in zip(several, places, strict=True)]
        cases.append(
            pytest.param(
                *(value for values, _ in chosen for value in values),
                id="-".join(name for _, name in chosen),
                marks=() if places in in_every_run else pytest.mark.wide,
            )
        )
    return pytest.mark.parametrize([name for dimension in dimensions for name in _names(dimension)], cases)


def sampled(cases: Iterable[object], number: int = 1) -> list[Any]:
    """The cases of a `pytest.mark.parametrize`: the first ones are in every run, and the others have the mark `wide`.

    For what takes long and goes the same way in each case. A tuple has the values of several arguments.
    """
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if place < number else pytest.mark.wide for place in range(len(several))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(several, marks, strict=True)]


def covering(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """The places of cases in which each value of each argument is met; few of them, and always the same."""
    missing = [{(name, id(value)) for name, value in case.items()} for case in cases]
    chosen = set[int]()
    while any(missing):
        place = max(range(len(cases)), key=lambda place: len(missing[place]))
        chosen.add(place)
        met = missing[place].copy()
        for values in missing:
            values -= met
    return chosen


def _places(sizes: list[int]) -> set[tuple[int, ...]]:
    longest = sizes.index(max(sizes))
    strides, stride = [], 1
    for dimension, size in enumerate(sizes):
        # Where there are too few cases for it, it goes along with the others.
        fits = dimension != longest and stride * size <= sizes[longest]
        strides.append(stride if fits else 1)
        stride *= size if fits else 1
    return {
        tuple(case // stride % size for stride, size in zip(strides, sizes, strict=True))
        for case in range(sizes[longest])
    }


def _names(dimension: pytest.MarkDecorator) -> list[str]:
    names: str | list[str] | tuple[str, ...] = dimension.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(dimension: pytest.MarkDecorator) -> list[tuple[tuple[Any, ...], str]]:
    """The values of each case, and its name."""
    names, cases, ids = _names(dimension), list(dimension.args[1]), dimension.kwargs.get("ids")
    ids = ids if ids is None or callable(ids) else list(ids)
    found = []
    for place, case in enumerate(cases):
        if isinstance(case, _PARAM):
            raise TypeError("a case with marks of its own has no place on a diagonal")
        values = (case,) if len(names) == 1 else tuple(case)
        if ids is None:
            told = [_name(name, value, place) for name, value in zip(names, values, strict=True)]
        else:
            told = [str(ids(value)) for value in values] if callable(ids) else [ids[place]]
        found.append((values, "-".join(told)))
    return found


def _name(name: str, value: object, place: int) -> str:
    """As pytest would name it."""
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    return str(getattr(value, "__name__", f"{name}{place}"))
