"""The public names: complete, in order, and imported only when they are used."""

import importlib
import subprocess
import sys

import pytest

import outboxq


def test_the_public_names_are_in_alphabetical_order() -> None:
    """`__all__` reads as `sorted()` gives it, without doubles."""
    assert outboxq.__all__ == sorted(set(outboxq.__all__))


@pytest.mark.parametrize("name", outboxq.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    """A name in `__all__` is there, is listed by dir(), and is the one that its module defines."""
    value = getattr(outboxq, name)
    assert name in dir(outboxq)
    if name != "__version__":
        assert value is getattr(importlib.import_module(f"outboxq.{outboxq._HOMES[name]}"), name)


def test_every_public_name_is_known_to_type_checkers() -> None:
    """The names that are found lazily are those of `__all__`."""
    assert set(outboxq._HOMES) | {"__version__"} == set(outboxq.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    """A typing error looks like one of any other module."""
    with pytest.raises(AttributeError, match="module 'outboxq' has no attribute 'add_jbo'"):
        _ = outboxq.add_jbo  # type: ignore[attr-defined]


@pytest.mark.wide
def test_importing_outboxq_imports_nothing_heavy() -> None:
    """`import outboxq` brings in neither SQLAlchemy nor a driver, so that `--help` is quick; using a name does."""
    code = (
        "import sys, outboxq\n"
        "heavy = {'sqlalchemy', 'psycopg', 'msgspec', 'alembic', 'asyncio', 'typing_extensions'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "outboxq.OutboxSession\n"
        "assert 'sqlalchemy' in sys.modules\n"
    )
    # Isolated: neither the environment nor the working directory brings in modules of its own.
    finished = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
