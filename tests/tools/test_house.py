"""`python -m tests.tools.house` measures what it says."""

from pathlib import Path

import pytest

from tests.tools.house import REPOSITORY, functions_of, main, measure

BRANCHES = """
def simple(): ...

def branchy(items):
    for item in items:          # 1
        if item:                # 2
            continue
        elif item is None:      # 3
            break
    else:                       # 4
        pass
    try:
        pass
    except ValueError:          # 5
        pass
    match items:
        case []:                # 6
            pass
        case _:
            pass
"""


def test_the_complexity_counts_the_ways_through_a_function() -> None:
    """One for the function, and one for each branch that it may take."""
    assert {each.name: each.complexity for each in functions_of("branches.py", BRANCHES)} == {"simple": 1, "branchy": 7}


def test_what_is_out_of_bounds_is_named(tmp_path: Path) -> None:
    """A module and a function that are too long, and a module that is too short unless it is a front door."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiny.py").write_text("x = 1\n")
    (package / "long.py").write_text("def long():\n" + "    pass\n" * 500)
    house = measure(package)
    assert house.tiny_modules == ["package/tiny.py"]
    assert house.long_modules == ["package/long.py"]
    assert [each.name for each in house.long_functions] == ["long"]
    assert not house.is_in_bounds


def test_the_package_is_measured_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line is counted once, and every layer has some."""
    assert main([]) == 0
    said = capsys.readouterr().out
    lines = sum(len(path.read_text().splitlines()) for path in (REPOSITORY / "outboxq").rglob("*.py"))
    assert f"{lines:,} lines" in said
    assert " 0\n" not in said.partition("layers: ")[2]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m tests.tools.house --check" in capsys.readouterr().out
