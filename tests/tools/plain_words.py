"""Count words that this project's prose avoids, in comments, docstrings and Markdown.

The subject of a sentence is the thing's name: receives in place of `is told`, after in place of `behind`, has
ended in place of `is over`. Code, string data, `inline code` and code blocks are not counted.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEST = REPOSITORY / "tests/package/test_plain_words.py"

_HELP = """\
examples:
  python -m tests.tools.plain_words                       # print the table of bounds, by the present counts
  python -m tests.tools.plain_words --write               # write it into tests/package/test_plain_words.py
  python -m tests.tools.plain_words --places docs behind  # print each place of a pattern in an area"""

# The areas, each with its folders and files.
AREAS = {
    "outboxq": ("outboxq",),
    "benchmarks": ("benchmarks",),
    "tests": ("tests", "conftest.py"),
    "examples": ("examples",),
    "docs": ("docs",),
    "README": ("README.md",),
    "CONTRIBUTING": ("CONTRIBUTING.md",),
    "CHANGELOG": ("CHANGELOG.md",),
}

# Only at the beginning of a docstring.
_FIRST_WORD = "first word"
_POOLER = r"(?: (?:a|an|the|your))?(?: transaction)? (?:pooler|proxy|load balancer)"
PATTERNS = {
    _FIRST_WORD: re.compile(r"\A\s*(?:What|Whether|How|Who|Where|When|Which|Have|Let|Those) "),
    "is told": re.compile(r"\b(?:is|are|was|were|be|been)\s+told\b", re.IGNORECASE),
    "hears of": re.compile(r"\bhear[sd]?\s+of\b", re.IGNORECASE),
    "asked for": re.compile(r"\basked\s+(?:of|for)\b|\bis\s+asked\b", re.IGNORECASE),
    # In place, and not in time: a pooler, or what is left.
    "behind": re.compile(rf"(?<!left )(?<!leaves nothing )(?<! s )\bbehind\b(?!{_POOLER})", re.IGNORECASE),
    "besides": re.compile(r"\bbesides\b", re.IGNORECASE),
    "stands": re.compile(r"\bstands?\b", re.IGNORECASE),
    "is over": re.compile(r"\b(?:is|are|was|were)\s+over\b(?!\s+(?:\d|the\s))", re.IGNORECASE),
    "of ours": re.compile(r"\bof\s+(?:ours|theirs|yours|before)\b", re.IGNORECASE),
    "nobody": re.compile(
        r"\b(?:nobody|somebody|whatever|whoever|in\s+vain|lest|anew|meanwhile|mostly)\b", re.IGNORECASE
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of bounds, write it into the test, or print places."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.plain_words",
        description=str(__doc__),
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the table into the test")
    parser.add_argument("--places", nargs=2, metavar=("AREA", "PATTERN"), help="print each place instead")
    options = parser.parse_args(arguments)
    if options.places:
        area, pattern = options.places
        print("\n".join(places(area)[pattern]))
        return 0
    written = table()
    if options.write:
        text = TEST.read_text()
        TEST.write_text(re.sub(r"^BOUNDS = \{\n.*?^\}\n", lambda _: written, text, flags=re.MULTILINE | re.DOTALL))
    else:
        print(written, end="")
    return 0


def table() -> str:
    """Return the table of bounds as the test has it, by the present counts."""
    lines = []
    for area in AREAS:
        counts = {pattern: len(found) for pattern, found in places(area).items() if found}
        if counts:
            rows = "".join(f'        "{pattern}": {count},\n' for pattern, count in counts.items())
            lines.append(f'    "{area}": {{\n{rows}    }},\n')
    return f"BOUNDS = {{\n{''.join(lines)}}}\n"


@cache
def places(area: str) -> dict[str, list[str]]:
    """Return the places of each pattern in an area, such as `outboxq/inbox.py:7: nobody`."""
    found: dict[str, list[str]] = {pattern: [] for pattern in PATTERNS}
    for path in _files(area):
        read = _prose_of_markdown if path.suffix == ".md" else _prose_of_python
        for line, text, is_docstring in read(path.read_text()):
            prose = re.sub(r"`[^`]*`", lambda code: "`" + "\n" * code[0].count("\n") + "`", text)
            for name, pattern in PATTERNS.items():
                if name == _FIRST_WORD and not is_docstring:
                    continue
                for match in pattern.finditer(prose):
                    at = line + prose.count("\n", 0, match.start())
                    found[name].append(f"{path.relative_to(REPOSITORY)}:{at}: {' '.join(match[0].split())}")
    return found


def _files(area: str) -> Iterator[Path]:
    for name in AREAS[area]:
        path = REPOSITORY / name
        if path.is_dir():
            yield from sorted(found for found in path.rglob("*.md" if name == "docs" else "*.py") if _is_ours(found))
        elif path.exists():
            yield path


def _is_ours(path: Path) -> bool:
    parts = path.relative_to(REPOSITORY).parts
    return not any(part.startswith(".") or part in ("node_modules", "__pycache__", "build") for part in parts)


def _prose_of_python(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield docstrings and comments: the line, the text, and True for a docstring. Comment lines are joined."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value.value
                    if isinstance(value, str):
                        yield statement.lineno, value, True
    comments: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#").strip()
            line, column = token.start
            if comments and comments[-1][:2] == (line - 1 - comments[-1][2].count("\n"), column):
                comments[-1] = (*comments[-1][:2], f"{comments[-1][2]}\n{words}")
            else:
                comments.append((line, column, words))
    for line, _, words in comments:
        yield line, words, False


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the whole text, without the code blocks in it."""
    blanked = re.sub(
        r"^ *(```|~~~).*?^ *\1 *$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    yield 1, blanked, False


if __name__ == "__main__":
    sys.exit(main())
