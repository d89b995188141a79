"""Print the measures of a package: the sizes of its modules and functions, what is complex, and its layers."""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).parents[2]
MAX_MODULE_LINES, MIN_MODULE_LINES = 400, 15
MAX_FUNCTION_LINES, MAX_COMPLEXITY = 40, 10

_HELP = """\
Modules should have 15 to 400 lines, functions at most 40 and a complexity of at most 10. Front doors (__init__,
__main__) may be shorter. The complexity is McCabe's: the number of ways through a function, as ruff counts it (C901).
Layers are those of [tool.importlinter] in pyproject.toml, the top first, with the lines of each package.

examples:
  python -m tests.tools.house
  python -m tests.tools.house --check          also end with 1 if a module or a function is out of bounds
  python -m tests.tools.house tests            of another folder"""


@dataclass(frozen=True)
class Function:
    """A function and its measures."""

    place: str
    name: str
    lines: int
    complexity: int


@dataclass(frozen=True)
class House:
    """The lines of each module, by its path, and the functions of all of them."""

    modules: dict[str, int]
    functions: list[Function]

    @property
    def long_modules(self) -> list[str]:
        return [path for path, lines in self.modules.items() if lines > MAX_MODULE_LINES]

    @property
    def tiny_modules(self) -> list[str]:
        front_doors = ("__init__.py", "__main__.py")
        return [
            path for path, lines in self.modules.items() if lines < MIN_MODULE_LINES and not path.endswith(front_doors)
        ]

    @property
    def long_functions(self) -> list[Function]:
        return sorted((each for each in self.functions if each.lines > MAX_FUNCTION_LINES), key=lambda f: -f.lines)

    @property
    def complex_functions(self) -> list[Function]:
        found = (each for each in self.functions if each.complexity > MAX_COMPLEXITY)
        return sorted(found, key=lambda f: -f.complexity)

    @property
    def is_in_bounds(self) -> bool:
        return not (self.long_modules or self.tiny_modules or self.long_functions or self.complex_functions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measures; 1 if they are to be checked and one is out of bounds."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.house",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", default="outboxq", help="what to measure (default: outboxq)")
    parser.add_argument("--check", action="store_true", help="end with 1 if something is out of bounds")
    options = parser.parse_args(arguments)
    house = measure(REPOSITORY / options.folder)
    for line in (*report(house), *(layers(house) if options.folder == "outboxq" else ())):
        print(line)
    return 1 if options.check and not house.is_in_bounds else 0


def measure(folder: Path) -> House:
    """Read every module below a folder."""
    texts = {str(path.relative_to(folder.parent)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    return House(
        {path: len(text.splitlines()) for path, text in texts.items()},
        [function for path, text in texts.items() for function in functions_of(path, text)],
    )


def functions_of(path: str, text: str) -> Iterator[Function]:
    """The functions and methods of a module, nested ones included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(f"{path}:{node.lineno}", node.name, lines, 1 + sum(map(_ways, node.body)))


def _ways(node: ast.AST) -> int:
    """How many ways through a function a statement adds, with all that stands in it."""
    inner = sum(_ways(child) for child in ast.iter_child_nodes(node) if isinstance(child, _WITH_STATEMENTS))
    match node:
        case ast.If() | ast.ExceptHandler() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return inner + 1
        case ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.TryStar():
            loops = not isinstance(node, ast.Try | ast.TryStar)
            return inner + loops + bool(node.orelse)
        case ast.Match(cases=cases):
            last = cases[-1]
            is_rest = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
            return inner + len(cases) - is_rest
        case _:
            return inner


_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def report(house: House) -> Iterator[str]:
    """The measures, a line each, and what is out of bounds."""
    sizes = [each.lines for each in house.functions]
    lines = list(house.modules.values())
    yield f"modules    {len(lines):,}, {sum(lines):,} lines, median {median(lines):g}, {_upper(lines)}"
    yield f"functions  {len(sizes):,}, median {median(sizes):g} lines, {_upper(sizes)}"
    for title, modules in (
        (f"modules over {MAX_MODULE_LINES} lines", house.long_modules),
        (f"modules under {MIN_MODULE_LINES} lines", house.tiny_modules),
    ):
        yield f"{title}: {len(modules)}"
        yield from (f"  {house.modules[path]:4} {path}" for path in modules)
    yield f"functions over {MAX_FUNCTION_LINES} lines: {len(house.long_functions)}"
    yield from (f"  {each.lines:4} {each.name} {each.place}" for each in house.long_functions)
    yield f"functions with a complexity over {MAX_COMPLEXITY}: {len(house.complex_functions)}"
    yield from (f"  {each.complexity:4} {each.name} {each.place}" for each in house.complex_functions)


def _upper(numbers: Sequence[int]) -> str:
    return f"p90 {sorted(numbers)[int(len(numbers) * 0.9)]}, max {max(numbers)}"


def layers(house: House) -> Iterator[str]:
    """The layers of the package, the top first, and the lines of what is in each."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (found,) = (contract for contract in contracts if contract["type"] == "layers")
    yield f"layers: {len(found['layers'])}"
    for number, layer in enumerate(found["layers"], 1):
        packages = layer.replace("|", " ").replace(":", " ").split()
        yield f"  {number:2} " + ", ".join(f"{package} {_lines_of(house, package):,}" for package in packages)


def _lines_of(house: House, package: str) -> int:
    own = (f"outboxq/{package}.py", f"outboxq/{package}/")
    return sum(lines for path, lines in house.modules.items() if path.startswith(own))


if __name__ == "__main__":
    sys.exit(main())
