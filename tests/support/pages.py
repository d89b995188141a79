"""The documents as tests read them: their blocks of code, and the application that docs/ten-minutes.md builds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# The page whose application the samples of the others use.
TEN_MINUTES = ROOT / "docs" / "ten-minutes.md"
PAGES = sorted(ROOT.glob("docs/**/*.md"))

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w/]+\.py)`[^`]*:\s*$")
# A part of a page that `python -m tests.tools.api_reference` writes: its marker with the names, the text, its end.
GENERATED = re.compile(r"(?P<begin><!-- api: (?P<names>[^>]*) -->)\n(?P<text>.*?)\n?(?P<end><!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, the number of its first line, and the words before it."""

    language: str
    text: str
    line: int
    before: str

    @property
    def file(self) -> str | None:
        """The file that it is, if the words before it say so."""
        named = _FILE.search(self.before)
        return named and named[1]


def blocks(document: Path) -> list[Block]:
    """All blocks of code of a document, but for those of generated parts, which are signatures."""
    text = GENERATED.sub(lambda part: "\n" * part[0].count("\n"), document.read_text())
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        indent, language, code = match.groups()
        shown = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        found.append(Block(language, shown, text.count("\n", 0, match.start()) + 2, text[end : match.start()]))
        end = match.end()
    return found


def python_of(document: Path) -> str:
    """All Python of a document, each line where it stands in there, so that an error names it."""
    lines = [""] * (document.read_text().count("\n") + 1)
    for block in blocks(document):
        if block.language == "python":
            given = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(given)] = given
    return "\n".join(lines)


def application_files() -> Iterator[tuple[str, str]]:
    """The files of the application of ten minutes, by their paths."""
    for block in blocks(TEN_MINUTES):
        if block.language == "python" and block.file:
            yield block.file, block.text


def write_application(directory: Path) -> None:
    """Write the package of the application of ten minutes, without its migrations."""
    for path, text in application_files():
        if path.startswith("myapp/"):
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text)
