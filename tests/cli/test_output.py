"""What is printed as JSON: the same values for a program, and nothing that a terminal acts on."""

import json

import pytest

from outboxq.cli.output import fail, notice, print_json, speaking_json

# Control sequences in one character, as ISO 6429 has them; one that turns the direction of a line; one outside the BMP.
HOSTILE = "\x9b31m \x85 \u202e \u2028 \U000e0001 \x7f é 名"


@pytest.mark.parametrize("sort", ["document", "notice", "error"])
def test_json_holds_nothing_that_a_terminal_acts_on(sort: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and reasons come from the database; what is printed reads as them, and is plain text with line breaks."""
    with speaking_json(True):
        if sort == "document":
            print_json({"reason": HOSTILE, "errors": [1]})
        elif sort == "notice":
            notice(HOSTILE)
        else:
            fail(HOSTILE, 1, "CommandFailed")
    said = "".join(capsys.readouterr())
    assert all(line.isprintable() for line in said.split("\n"))
    assert "é 名" in said
    assert HOSTILE in json.loads(said).values()
