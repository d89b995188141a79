"""Print the measures of the package: sizes, layers, what its core mentions, and the breadth of a job's way."""

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

from outboxq import config
from outboxq.postgres import find_server
from tests.support import app
from tests.support.way_of_a_job import PACKAGE, WAYS, measure_way

REPOSITORY = Path(__file__).parents[2]

_HELP = """\
Layers are those of [tool.importlinter] in pyproject.toml, the top first, with the lines of each package. The figures of
the core and of the ways are bounded in tests/relay/test_way_of_a_job.py. The ways are measured on the server that
OUTBOXQ_TEST_DATABASE_URL names, or on one that is started for this.

examples:
  python -m tests.tools.house
  python -m tests.tools.house --files"""

# The files that every job passes, with a family or without.
_CORE = (
    "relay/slot.py",
    "relay/slot_*.py",
    "relay/*planner*.py",
    *(f"execution/{name}.py" for name in ("claim", "run", "commit", "recovery", "batch_state")),
)
# The lines that mention a family. Left out are other things of the same word: a `SlotGroup`, a task or a statement
# that is cancelled, a handler's own prepared statements and transactions, the size of a claim (`limit`), a relay's
# times (`state.limits`), a lease's token.
_FAMILIES = {
    "groups": r'(?<!slot)group(?!: slot|, "|\.(queues|in_turns))',
    "suspects": "suspect",
    "kept rows": r"keeper|keeping|kept|execution\.keep\b|keep finished|(?<!un)finished.(job|row)",
    "coalescing and windows": "coalesc|window",
    "cancellation": r"orders\.cancel|cancelledresult|jobcancelled|def cancel\(|invoker\.cancel|ctx\.cancel",
    "prepared claims": r"(?<!left)(?<!leave_)(?<!un)(?<!result\.)(?<!stale )(?<!handler )prepare(?!s\b)",
    "limits": r"(?<!state\.)limits(?!\.\w+_seconds| = self)|other_limit|queuelimit|\b(its|'s|the|another) limit\b",
    "rates": r"\brates?\b|tokens",
    "callback batches": r"callback.batch|job_batch|jobs\.batch|batch_id|batchfinished",
    "unique jobs": "unique",
}
# The files that say all that can happen to a job.
_READ = {
    "execution/": ("execution/*.py",),
    "relay/ without maintenance/": ("relay/*.py",),
    "statements/ of claims and outcomes": tuple(
        f"statements/{name}*.py"
        for name in ("claim", "group_claim", "lease", "settle", "transaction", "limit", "windows", "coalesce")
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.house",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", action="store_true", help="print the functions that each way calls, by file")
    options = parser.parse_args(arguments)
    for line in (*sizes(), *layers()):
        print(line)
    for name, figure in core_figures().items():
        print(f"{name}: {figure:,}")
    with find_server(configured_url=config.test_database_url(), binaries=config.local_binaries()) as server:
        for name in WAYS:
            with server.create_database() as database:
                app.prepare(database.url)
                way, files = measure_way(database.url, name)
                print(f"{name}: {way}", flush=True)
                for file, called in sorted(files.items(), key=lambda each: each[1].total()) if options.files else ():
                    functions = (f"{name} {count}" if count > 1 else name for name, count in called.items())
                    print(f"  {called.total():3} {file}: {', '.join(functions)}")
    return 0


def sizes() -> Iterator[str]:
    """The sizes of the modules and of the functions."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    lines = [len(text.splitlines()) for text in texts]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    yield f"modules: {len(lines):,}, {sum(lines):,} lines, {_spread(lines)}"
    yield f"functions: {len(functions):,}, lines {_spread(functions)}"


def _spread(numbers: Sequence[int]) -> str:
    return f"median {median(numbers):g}, p90 {sorted(numbers)[int(len(numbers) * 0.9)]}, max {max(numbers)}"


def layers() -> Iterator[str]:
    """The layers of the package, the top first, and the lines of what is in each."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (found,) = (contract for contract in contracts if contract["type"] == "layers")
    yield f"layers: {len(found['layers'])}"
    for number, layer in enumerate(found["layers"], 1):
        packages = layer.replace("|", " ").replace(":", " ").split()
        yield f"  {number:2} " + ", ".join(
            f"{name} {_lines_of(f'{name}.py', f'{name}/**/*.py'):,}" for name in packages
        )


def core_figures() -> dict[str, int]:
    """Mentions of families in the core, assignments to its objects, and the lines of its folders, each by its name."""
    patterns = (*_CORE, *(pattern for read in _READ.values() for pattern in read))
    if gone := [pattern for pattern in patterns if not any(PACKAGE.glob(pattern))]:
        raise FileNotFoundError(f"no file of the package is named {', '.join(gone)}: name its successor in {__file__}")
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        **_batch_state_figures(texts),
        **_planner_figures(texts),
        **{f"lines of the core that mention {name}": _mentions(pattern) for name, pattern in _FAMILIES.items()},
        **{f"lines of {name}": _lines_of(*patterns) for name, patterns in _READ.items()},
    }


def _batch_state_figures(texts: dict[str, str]) -> dict[str, int]:
    home = "execution/batch_state.py"
    classes = _classes(texts[home])
    fields = _fields(classes["BatchState"])
    of_parts = {field: _fields(classes[kind]) for field, kind in fields.items() if kind in classes}
    # A producer's batch is of another class, and `outboxq/outbox/` cannot import this one.
    assigned = {
        path: [
            *(name for name in assignments(text, "BatchState", ("batch", "state")) if name in fields),
            *(name for part, names in of_parts.items() for name in assignments(text, part, (part,)) if name in names),
        ]
        for path, text in texts.items()
        if path != home and "outboxq.execution" in text
    }
    outside = [names for path, names in assigned.items() if not path.startswith("execution/")]
    return {
        "fields of BatchState": len(fields),
        "fields of its parts": sum(map(len, of_parts.values())),
        "assignments to them in other modules": sum(map(len, assigned.values())),
        "other modules that assign them": sum(map(bool, assigned.values())),
        "assignments to them outside execution/": sum(map(len, outside)),
    }


def _fields(found: ast.ClassDef) -> dict[str, str]:
    """The fields of a dataclass, each with its type."""
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _planner_figures(texts: dict[str, str]) -> dict[str, int]:
    ((home, planner),) = (
        (path, found)
        for path, text in texts.items()
        if path.startswith("relay/") and "planner" in path
        for name, found in _classes(text).items()
        if name.endswith("Planner")
    )
    methods = [
        node.name for node in planner.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    written = {
        name for path, text in texts.items() if path != home for name in assignments(text, planner.name, ("planner",))
    }
    return {
        "public methods of the planner": len(methods),
        "attributes of the planner that other modules assign": len(written),
    }


def assignments(text: str, class_name: str, names: Collection[str]) -> list[str]:
    """The attributes that a module assigns on objects of a class, which have one of these names or are annotated so."""
    nodes = list(ast.walk(ast.parse(text)))
    typed = {
        node.arg if isinstance(node, ast.arg) else _last_name(node.target)
        for node in nodes
        if isinstance(node, ast.arg | ast.AnnAssign)
        and node.annotation is not None
        and class_name in ast.unparse(node.annotation)
    }
    return [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (_last_name(node.value) in typed or _last_name(node.value).lstrip("_") in names)
    ]


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _classes(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def _mentions(pattern: str) -> int:
    lines = (line for core in _CORE for path in PACKAGE.glob(core) for line in code_of(path.read_text()))
    return sum(bool(re.search(pattern, line, re.IGNORECASE)) for line in lines)


def _lines_of(*patterns: str) -> int:
    paths = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    return sum(len(code_of(path.read_text())) for path in paths)


def code_of(text: str) -> list[str]:
    """Return the lines with code: without comments, docstrings and empty lines."""
    lines = text.splitlines()
    prose = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for node in prose:
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


if __name__ == "__main__":
    sys.exit(main())
