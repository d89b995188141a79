"""docs/reference/*.md has the signatures and the docstrings of the package."""

import re
from pathlib import Path

import griffe
import pytest

from tests.support.pages import GENERATED
from tests.tools import api_reference
from tests.tools.api_reference import PAGES, main, rewritten

SOURCE = {
    "__init__.py": """
from pkg.inside import Box
""",
    "inside.py": '''
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["fast", "slow"]
SECONDS = 2.0
_UNSET = object()


class Lid:
    """No page has it."""

    def shut(self) -> None:
        """Shut it."""


@dataclass(kw_only=True)
class Box(Lid):
    """A box.

    Args:
        width: In metres,
            from 1 to 9.

    Raises:
        ValueError, TypeError: no such width.
    """

    width: int
    mode: Mode = "fast"
    items: list[int] = field(default_factory=list)
    hidden: bool = field(default=False, repr=False)

    def open(self, seconds: float = SECONDS, *, by: object = _UNSET) -> str | None:
        """Open it.

        Returns:
            "opened": it was shut. None: it was open.
        """

    def undocumented(self) -> None: ...

    def internal(self) -> None:
        """For the package."""

    @property
    def is_open(self) -> bool:
        """True if it is open."""
        return True
''',
}


@pytest.fixture
def package(tmp_path: Path) -> griffe.Module:
    """A package of two modules."""
    (tmp_path / "pkg").mkdir()
    for name, text in SOURCE.items():
        (tmp_path / "pkg" / name).write_text(text)
    return griffe.load("pkg", search_paths=[tmp_path], docstring_parser="google")


def part(package: griffe.Module, marker: str) -> str:
    """The part that a marker leads to."""
    page = Path("page.md")
    return rewritten({page: f"By hand.\n\n<!-- api: {marker} -->\n<!-- end -->\n\nBy hand.\n"}, package)[page]


def test_the_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Their generated parts are those of today's package; if not: `python -m tests.tools.api_reference`."""
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_current_is_refused(
    package: griffe.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that writes it, which keeps what is written by hand."""
    monkeypatch.setattr(griffe, "load", lambda *_, **__: package)
    (tmp_path / "page.md").write_text("By hand.\n\n<!-- api: pkg.Box -->\nof yesterday\n<!-- end -->\n\nBy hand.\n")
    monkeypatch.setattr(api_reference, "PAGES", tmp_path)
    assert main(["--check"]) == 1
    assert "page.md is not current: python -m tests.tools.api_reference" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.count("By hand.") == 2
    assert "of yesterday" not in text


def test_a_class_has_its_signature_its_sections_and_its_documented_members(package: griffe.Module) -> None:
    """Also members of a base that no page has; defaults and aliases are shown by their values."""
    assert (
        part(package, "pkg.Box -internal")
        == """\
By hand.

<!-- api: pkg.Box -internal -->

### `pkg.Box`

```python
class pkg.Box(
    *,
    width: int,
    mode: Literal["fast", "slow"] = "fast",
    items: list[int] = list(),
    hidden: bool = False,
)
```

A box.

Args:

- `width`: In metres, from 1 to 9.

Raises:

- `ValueError`, `TypeError`: no such width.

Attributes:

- `is_open: bool`: True if it is open.

#### `Box.open`

```python
Box.open(seconds: float = 2.0, *, by: object = ...) -> str | None
```

Open it.

Returns: "opened": it was shut. None: it was open.

#### `Box.shut`

```python
Box.shut() -> None
```

Shut it.

<!-- end -->

By hand.
"""
    )


def test_what_a_marker_leaves_out_is_left_out(package: griffe.Module) -> None:
    """A field, a section, all members; without the constructor the fields are listed."""
    text = part(package, "pkg.Box -__init__ -hidden -Args -Raises -*")
    assert (
        text.split("\n\n", 2)[2]
        == """\
### `pkg.Box`

```python
class pkg.Box:
    width: int
    mode: Literal["fast", "slow"]
    items: list[int]
```

A box.

<!-- end -->

By hand.
"""
    )


@pytest.mark.parametrize("marker", ["pkg.Chest", "pkg.Box -handle"])
def test_a_marker_that_names_nothing_is_refused(package: griffe.Module, marker: str) -> None:
    """A name that is gone, and a member to leave out that is."""
    with pytest.raises(ValueError, match="mend its marker in docs/reference"):
        part(package, marker)


def test_every_marker_has_its_end() -> None:
    """One without would take the next part for its own, or stay empty."""
    for path in PAGES.glob("*.md"):
        text = path.read_text()
        ends = [found[0] for found in re.finditer(r"^<!-- (?:api: |end -->)", text, re.MULTILINE)]
        assert ends == ["<!-- api: ", "<!-- end -->"] * len(GENERATED.findall(text)), path.name


def test_every_error_says_what_to_do() -> None:
    """The last column of the table of errors, which is written by hand."""
    assert re.findall(r"^\| `(\w+)`.*\|\s+\|$", (PAGES / "errors.md").read_text(), re.MULTILINE) == []
