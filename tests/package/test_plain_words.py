"""Comments, docstrings and pages avoid the words that made this project's prose hard to read; old ones only get fewer.

If a bound is too high or too low: `python -m tests.tools.plain_words --write`, and read what changed.
"""

import re
from pathlib import Path

import pytest

from tests.tools import plain_words
from tests.tools.plain_words import AREAS, PATTERNS, TEST, places

_MODULE = '''\
"""What it is, behind a pooler."""

# A name behind a name. Two lines
# are told as one.
NOBODY = "nobody is told of `nobody`"
'''
_PAGE = "Nobody knows it.\n\n```text\nnobody\n```\n\n`whatever` is code.\n"
_TABLE = re.compile(r"^BOUNDS = \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)

# How often each pattern may be found in each area; 0 if it is not named.
BOUNDS = {
    "tests": {
        "first word": 421,
        "is told": 87,
        "hears of": 9,
        "asked for": 59,
        "behind": 146,
        "besides": 9,
        "stands": 148,
        "is over": 37,
        "of ours": 37,
        "nobody": 305,
    },
    "examples": {
        "first word": 56,
        "is told": 11,
        "asked for": 2,
        "behind": 6,
        "stands": 11,
        "of ours": 10,
        "nobody": 5,
    },
    "docs": {
        "behind": 6,
        "stands": 4,
        "of ours": 2,
        "nobody": 1,
    },
    "README": {
        "behind": 1,
    },
}


@pytest.mark.large
@pytest.mark.parametrize("area", AREAS)
def test_the_avoided_words_only_get_fewer(area: str) -> None:
    """New text has none of them, and a bound follows each word that goes."""
    wrong = []
    for pattern, found in places(area).items():
        bound = BOUNDS.get(area, {}).get(pattern, 0)
        if len(found) > bound:
            wrong.append(f"{pattern!r}: {len(found)} in place of {bound}, say it in other words: {'; '.join(found)}")
        if len(found) < bound:
            wrong.append(f"{pattern!r}: lower the bound to {len(found)} (python -m tests.tools.plain_words --write)")
    assert not wrong, "\n".join(wrong)


def test_every_bound_is_of_a_pattern_in_an_area() -> None:
    """A name that is misspelt would bound nothing."""
    assert set(BOUNDS) <= set(AREAS)
    assert {pattern for counts in BOUNDS.values() for pattern in counts} <= set(PATTERNS)


def test_only_prose_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Docstrings, comments and Markdown are; code, data, code within prose and what is behind a pooler are not."""
    (tmp_path / "module.py").write_text(_MODULE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(_PAGE)
    monkeypatch.setattr(plain_words, "REPOSITORY", tmp_path)
    monkeypatch.setattr(plain_words, "AREAS", {"planted": ("module.py", "docs")})
    assert {pattern: found for pattern, found in places("planted").items() if found} == {
        "first word": ["module.py:1: What"],
        "is told": ["module.py:4: are told"],
        "behind": ["module.py:3: behind"],
        "nobody": ["docs/page.md:1: Nobody"],
    }


def test_the_table_is_written_in_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--write` replaces it in this file, and nothing else."""
    written = tmp_path / "written.py"
    text = TEST.read_text()
    written.write_text(text.replace('"tests": {', '"tests": {"other": 1, ', 1))
    monkeypatch.setattr(plain_words, "TEST", written)
    monkeypatch.setattr(plain_words, "table", lambda: _TABLE.search(text)[0])
    assert plain_words.main(["--write"]) == 0
    assert written.read_text() == text
