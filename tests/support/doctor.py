"""`outboxq doctor` as its tests use it, and databases that are broken by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.support.cli import call
from tests.support.urls import libpq_url

Finding = dict[str, Any]


def examine(url: str, *arguments: object) -> list[Finding]:
    """All findings, after a look at the exit code."""
    outcome = call("doctor", "--json", *arguments, url=url)
    assert outcome.stderr == "", outcome
    found: list[Finding] = outcome.json["findings"]
    assert all(finding["title"] and finding["advice"] for finding in found)
    needed = any(finding["severity"] in ("problem", "warning") for finding in found)
    assert outcome.exit_code == int(needed), outcome
    return found


def named(url: str, code: str, *arguments: object) -> list[Finding]:
    """The findings with this code."""
    return [finding for finding in examine(url, *arguments) if finding["code"] == code]


def only(url: str, code: str, *arguments: object) -> Finding:
    """The one finding with this code."""
    found = examine(url, *arguments)
    (one,) = [finding for finding in found if finding["code"] == code] or [found]
    assert isinstance(one, dict), f"no {code} among {one}"
    return one


def execute(url: str, *statements: str) -> None:
    """Run statements, each committed on its own."""
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextmanager
def open_session(url: str, *statements: str, name: str = "forgotten") -> Iterator[int]:
    """A session that has run statements in a transaction, and then does nothing; yields its backend's pid."""
    with psycopg.connect(libpq_url(url), application_name=name) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection.info.backend_pid
        connection.rollback()
