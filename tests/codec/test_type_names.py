"""Names of types in errors: those that Python's documentation has, wherever a version of it defines the type."""

import collections
import concurrent.futures
import csv
import decimal
import pathlib
import queue
import socket

import pydantic
import pytest

from outboxq.codec.text import name_of, type_name


class Nested:
    """Has a class in it."""

    class Inner:
        """One more."""


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (pathlib.Path, "pathlib.Path"),
        (queue.Empty, "queue.Empty"),
        (csv.Error, "csv.Error"),
        (concurrent.futures.BrokenExecutor, "concurrent.futures.BrokenExecutor"),
        (pydantic.ValidationError, "pydantic_core.ValidationError"),
        (decimal.Decimal, "decimal.Decimal"),
        (collections.OrderedDict, "collections.OrderedDict"),
        (socket.gaierror, "socket.gaierror"),
        (ValueError, "ValueError"),
        (Nested.Inner, f"{__name__}.Nested.Inner"),
        (list[int], "list[int]"),
    ],
)
def test_a_type_has_the_name_that_it_is_documented_under(annotation: object, shown: str) -> None:
    """Private modules, which another Python may not have, are not named."""
    assert type_name(annotation) == shown


def test_a_private_class_of_a_private_module_keeps_its_whole_name() -> None:
    """No module is named that does not have the class."""
    secret = type("Secret", (), {"__module__": "queue._own"})
    assert type_name(secret) == "queue._own.Secret"


def test_errors_are_recorded_under_the_documented_name() -> None:
    """A kind of errors stays one when Python is upgraded."""
    assert name_of(queue.Empty()) == "queue.Empty"
