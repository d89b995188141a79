"""The strings that a relay sends, seen or changed by a test."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection

from outboxq.database.driver import Answer, Script


def note_scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each script is appended as it is sent."""
    sent = list[str]()
    change_scripts(monkeypatch, lambda script: sent.append(text_of(script)))
    return sent


def change_scripts(monkeypatch: pytest.MonkeyPatch, change: Callable[[Script], object]) -> None:
    """Have each script changed before it is sent."""
    send = Script.send

    def changed(script: Script, connection: Connection) -> Answer:
        change(script)
        return send(script, connection)

    monkeypatch.setattr(Script, "send", changed)


def behind_commit(script: Script) -> int | None:
    """The place behind a batch's COMMIT, if the script has one, and something behind it."""
    owners = [owner for owner, _ in script.parts]
    place = owners.index("commit") + 1 if "commit" in owners else len(owners)
    return place if place < len(owners) else None


def text_of(script: Script) -> str:
    """The script as it is sent."""
    return "; ".join(statement for _, statement in script.parts)
