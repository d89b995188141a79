"""`python -m tests.tools.house` measures what it says."""

import pytest

from tests.support.way_of_a_job import PACKAGE, WAYS
from tests.tools.house import assignments, main

ASSIGNING = """
def named(batch, self):
    batch.position = 1
    self._batch.together += 1
    batch.events.append(batch.deadline)
    batch.transaction.xid, batch.jobs = "", ()

def typed(one: BatchState | None, other: Batch):
    one.queue = other.queue = ""
"""


def test_assignments_are_found_by_the_name_or_the_type_of_their_object() -> None:
    """Also in a tuple, and by `+=`; calls, and assignments to other objects, do not count."""
    found = assignments(ASSIGNING, "BatchState", ["batch"])
    assert sorted(found) == ["jobs", "position", "queue", "together"]


@pytest.mark.wide
def test_the_package_is_measured_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line is counted once, every layer has some, and each way of a job is there."""
    assert main([]) == 0
    said = capsys.readouterr().out
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    assert f"{lines:,} lines" in said
    assert " 0\n" not in said.partition("layers: ")[2].partition("fields of")[0]
    assert [name for name in WAYS if f"{name}: " not in said] == []
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m tests.tools.house" in capsys.readouterr().out
