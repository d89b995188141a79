"""Write the generated parts of docs/reference/*.md: signatures and docstrings of the public names, as Markdown."""

import argparse
import importlib
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from difflib import unified_diff
from pathlib import Path

import griffe

from outboxq.handlers.options import HandlerOptions
from outboxq.outbox.options import JobOptions
from tests.support.pages import GENERATED, ROOT

PAGES = ROOT / "docs" / "reference"
WIDTH = 110

_HELP = """\
A generated part begins with <!-- api: NAMES --> and ends with <!-- end -->; the rest of a page is written by hand.
Each name is a path such as outboxq.add_job. After a class, -name leaves out a member, a field or a section such as
Args, -* all members, and -__init__ the constructor of values that users never make: their fields are listed instead.
The modules outboxq.errors and outboxq.events, and typed dicts, become tables. In the table of errors the last column
is written by hand, and kept.

examples:
  python -m tests.tools.api_reference            # write the parts
  python -m tests.tools.api_reference --check    # end with 1 if one is not what would be written"""

# Sections of a docstring, by their headings there.
_SECTIONS = {"parameters": "Args", "returns": "Returns", "raises": "Raises", "attributes": "Attributes"}
# Options of a handler whose default no dataclass has.
_DEFAULTS = {"kind": "the function's name", "retry": "`Backoff()`", "messages": "the registry's"}
_OPTIONS = "[the options of handlers](handlers.md#options-of-handlers)"
_KIND = griffe.ParameterKind


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the parts, or compare them; 1 if one is not current."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.api_reference",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    found = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    written = rewritten(found, griffe.load("outboxq", search_paths=[ROOT], docstring_parser="google"))
    ended = 0
    for path, text in found.items():
        if text != written[path]:
            if options.check:
                ended = 1
                print(f"{path.name} is not current: python -m tests.tools.api_reference", file=sys.stderr)
                difference = unified_diff(
                    text.splitlines(), written[path].splitlines(), "found", "expected", n=1, lineterm=""
                )
                print("\n".join(difference), file=sys.stderr)
            else:
                path.write_text(written[path])
    return ended


def rewritten(pages: dict[Path, str], package: griffe.Module) -> dict[Path, str]:
    """The pages with the parts that the package has today."""
    markers = [part["names"] for text in pages.values() for part in GENERATED.finditer(text)]
    writer = _Writer(package, [name for names in markers for name in names.split() if not name.startswith("-")])

    def write(part: re.Match[str]) -> str:
        return f"{part['begin']}\n{writer.part(part['names'], part['text'])}\n{part['end']}"

    return {path: GENERATED.sub(write, text) for path, text in pages.items()}


class _Writer:
    """Writes the entries of the names that the pages' markers have."""

    def __init__(self, package: griffe.Module, paths: Iterable[str]) -> None:
        self._package = package
        found = [self._find(path) for path in paths]
        # What a class inherits from a base with an entry of its own is not shown again.
        self._with_entry = {each.path for each in found}
        self._with_entry |= {name.path for each in found if each.is_module for name in each.classes.values()}

    def part(self, marker: str, old: str) -> str:
        """The text between a marker and its end; `old` is the present one."""
        entries: dict[str, set[str]] = {}
        for name in marker.split():
            if name.startswith("-"):
                list(entries.values())[-1].add(name[1:])
            else:
                entries[name] = set()
        return "".join(f"\n{self._entry(path, left_out, old)}\n" for path, left_out in entries.items())

    def _find(self, path: str) -> griffe.Object:
        found: griffe.Object | griffe.Alias = self._package
        for name in path.split(".")[1:]:
            if name not in found.members:
                raise ValueError(f"there is no {path}: mend its marker in docs/reference")
            found = found[name]
        return found.final_target if isinstance(found, griffe.Alias) else found

    def _entry(self, path: str, left_out: Collection[str], old: str) -> str:
        found = self._find(path)
        if isinstance(found, griffe.Module):
            return self._table_of_errors(found, old) if found.name == "errors" else self._table_of_events(found)
        if isinstance(found, griffe.Class) and _is_typed_dict(found):
            return self._table_of_options(found)
        parts = [f"### `{path.removeprefix('outboxq.')}`"]
        if isinstance(found, griffe.Class):
            parts += self._class(path, found, left_out)
        elif isinstance(found, griffe.Function):
            parts += [self._call(path, found), *_documentation(found)]
        else:
            parts += [_code(f"{path} = {_shown(found.value)}"), *_documentation(found)]
        return "\n\n".join(parts)

    def _class(self, path: str, found: griffe.Class, left_out: Collection[str]) -> Iterator[str]:
        members = self._members(found)
        values = _fields(found)
        known = {"*", "__init__", *_SECTIONS.values(), *members, *(each.name for each in values)}
        if unknown := sorted(set(left_out) - known):
            raise ValueError(f"{path} has no {', '.join(unknown)}: mend its marker in docs/reference")
        values = [each for each in values if each.name not in left_out]
        # The arguments of a plain class's constructor are no fields.
        own = found.members if _is_struct(found) or "dataclass" in found.labels else {}
        extended = [base.name for base in found.resolved_bases if base.path in self._with_entry]
        if "__init__" in left_out or _is_enum(found):
            lines = [f"{each.name}: {_type(each.annotation)}" for each in values if each.name in own]
            lines += [f"{name} = {_shown(found[name].value)}" for name in found.attributes if _is_enum(found)]
            bases = f"({', '.join(extended)})" if extended else ""
            yield _code("\n    ".join([f"class {path}{bases}{':' if lines else ''}", *lines]))
        else:
            yield self._call(f"class {path}", found, values)
        shown = [] if "*" in left_out else [name for name in members if name not in left_out]
        described = [members[name] for name in shown if members[name].is_attribute]
        yield from _documentation(found, left_out, described)
        if extended and "__init__" not in left_out:
            yield f"Extends {', '.join(f'`{name}`' for name in extended)}."
        for name in shown:
            member = members[name]
            if isinstance(member, griffe.Function):
                of = f"{path.rpartition('.')[2]}.{name}"
                yield f"#### `{of}`"
                yield self._call(of, member)
                yield from _documentation(member)

    def _members(self, found: griffe.Class) -> dict[str, griffe.Object]:
        """The public members with a docstring: its own, and those of bases that have no entry."""
        classes = [found, *(base for base in found.mro() if base.path not in self._with_entry)]
        named: dict[str, griffe.Object] = {}
        for each in classes:
            for name, member in each.members.items():
                if not name.startswith("_") and not isinstance(member, griffe.Alias):
                    named.setdefault(name, member)
        return {name: member for name, member in named.items() if member.docstring}

    def _call(
        self, name: str, found: griffe.Class | griffe.Function, values: Iterable[griffe.Parameter] | None = None
    ) -> str:
        given = list(found.parameters)[1:] if isinstance(found.parent, griffe.Class) else list(found.parameters)
        arguments = list(_arguments(given if values is None else values))
        returned = f" -> {_type(found.returns)}" if isinstance(found, griffe.Function) and found.returns else ""
        awaited = "async " if "async" in found.labels else ""
        line = f"{awaited}{name}({', '.join(arguments)}){returned}"
        if len(line) <= WIDTH:
            return _code(line)
        broken = "".join(f"    {argument},\n" for argument in arguments)
        return _code(f"{awaited}{name}(\n{broken}){returned}")

    def _table_of_errors(self, module: griffe.Module, old: str) -> str:
        ways_out = dict(re.findall(r"^\| `(\w+)`.*\| (.*?) \|$", old, re.MULTILINE))
        rows = []
        for name, error in module.classes.items():
            bases = ", ".join(f"`{base}`" for base in map(str, error.bases))
            # One assignment may set several, as `self.kind, self.known = kind, known` does.
            targets = re.findall(r"^ +(self\..*?) = ", error.source, re.MULTILINE)
            cause = _cell(error)
            found = [f"`{each}`" for target in targets for each in re.findall(r"self\.(\w+)", target)]
            own = ", ".join(each for each in found if each not in cause)
            attributes = f" Attributes: {own}." if own else ""
            rows.append((f"`{name}`", bases, _escaped(cause + attributes), ways_out.get(name, "")))
        return _table(("Error", "Base", "Cause", "What to do"), rows)

    def _table_of_events(self, module: griffe.Module) -> str:
        rows = []
        own = {name: event for name, event in module.classes.items() if not event.is_alias}
        bases = {str(base) for event in own.values() for base in event.bases}
        for name, event in own.items():
            if name in bases:
                continue
            described = {each.name: _joined(each.description) for each in _items(event, "parameters")}
            shown = []
            for value in _fields(event):
                about = f" ({described[value.name].rstrip('.')})" if value.name in described else ""
                shown.append(f"`{value.name}: {_type(value.annotation)}`{about}")
            rows.append((f"`{name}`", _escaped(_cell(event)), _escaped(", ".join(shown))))
        return _table(("Event", "When", "Fields"), rows)

    def _table_of_options(self, typed_dict: griffe.Class) -> str:
        defaults = _DEFAULTS | {
            field.name: f"`{_quoted(repr(field.default))}`"
            for options in (JobOptions, HandlerOptions)
            for field in fields(options)
            if field.default is not MISSING and field.name not in _DEFAULTS
        }
        options = [each for base in (typed_dict, *typed_dict.mro()) for each in base.members.values()]
        rows = [
            (f"`{each.name}`", f"`{_escaped(_type(each.annotation))}`", defaults[each.name], _escaped(_cell(each)))
            for each in options
            if isinstance(each, griffe.Attribute)
        ]
        return _table(("Option", "Type", "Default", "Meaning"), rows)


def _documentation(
    found: griffe.Object, left_out: Collection[str] = (), attributes: Iterable[griffe.Object] = ()
) -> Iterator[str]:
    """The sections of a docstring, and `attributes` of the class that have docstrings of their own."""
    described = [_item(f"{each.name}: {_type(each.annotation)}", _joined(_cell(each))) for each in attributes]
    for section in _sections(found):
        if section.kind is griffe.DocstringSectionKind.text:
            yield section.value.strip()
            continue
        heading = _SECTIONS[section.kind.value]
        if heading in left_out:
            continue
        if heading == "Returns":
            # The parser takes `"done": it ran` for a name and its description.
            (returned,) = re.findall(r"^Returns:\n(.*?)(?=^\S|\Z)", found.docstring.value, re.MULTILINE | re.DOTALL)
            yield _filled(f"Returns: {_joined(returned)}")
        elif heading == "Attributes" or (heading == "Args" and "__init__" in left_out):
            described = [_item(each.name, each.description) for each in section.value] + described
        elif heading == "Args":
            yield _list(heading, [_item(each.name, _with_link(each)) for each in section.value])
        else:
            # Several errors with one reason are a tuple.
            named = [(_type(each.annotation).strip("()").replace(", ", "`, `"), each) for each in section.value]
            yield _list(heading, [_item(names, each.description) for names, each in named])
    if described:
        yield _list("Attributes", described)


def _sections(found: griffe.Object) -> list[griffe.DocstringSection]:
    if found.docstring is None:
        return []
    return found.docstring.parse("google", returns_multiple_items=False, returns_named_value=False, warnings=False)


def _items(found: griffe.Object, kind: str) -> list[griffe.DocstringParameter]:
    return [each for section in _sections(found) if section.kind.value == kind for each in section.value]


def _cell(found: griffe.Object) -> str:
    """The text of a docstring, without its lists."""
    texts = [each.value for each in _sections(found) if each.kind is griffe.DocstringSectionKind.text]
    return _joined(" ".join(texts))


def _with_link(parameter: griffe.DocstringParameter) -> str:
    """Options that come by `Unpack` have a table of their own."""
    unpacked = str(parameter.annotation).startswith("Unpack[")
    return _joined(parameter.description) + (f" See {_OPTIONS}." if unpacked else "")


def _fields(found: griffe.Class) -> list[griffe.Parameter]:
    """The arguments of a class's constructor: of a dataclass and a struct, its fields."""
    init = found.all_members.get("__init__")
    if init is not None:
        return list(init.parameters)[1:]
    return [
        griffe.Parameter(each.name, annotation=each.annotation, kind=_KIND.positional_or_keyword, default=each.value)
        for each in found.attributes.values()
        if _is_struct(found) and not each.name.startswith("_") and "property" not in each.labels
    ]


def _arguments(parameters: Iterable[griffe.Parameter]) -> Iterator[str]:
    """Parameters as a `def` has them, with `/` and `*` between their kinds."""
    before = None
    for each in parameters:
        if before is _KIND.positional_only and each.kind is not before:
            yield "/"
        if each.kind is _KIND.keyword_only and before not in (_KIND.keyword_only, _KIND.var_positional):
            yield "*"
        before = each.kind
        stars = {_KIND.var_positional: "*", _KIND.var_keyword: "**"}.get(each.kind, "")
        typed = f"{stars}{each.name}" + (f": {_type(each.annotation)}" if each.annotation else "")
        yield typed if stars or each.default is None else f"{typed} = {_default(each)}"
    if before is _KIND.positional_only:
        yield "/"


def _default(parameter: griffe.Parameter) -> str:
    """A default as a reader understands it: a constant by its value, a mere mark as `...`."""
    shown = _shown(parameter.default)
    if isinstance(parameter.default, griffe.ExprName) and shown not in ("True", "False", "None"):
        # griffe does not see the names of `A, B = 1, 2`.
        constant = _constant(parameter.default) or repr(_at_runtime(parameter.default))
        return "..." if constant == "object()" else _quoted(constant)
    return shown


def _constant(name: griffe.ExprName) -> str | None:
    """The value of a constant of a module; None for any other name."""
    if not isinstance(name.parent, griffe.Object):
        return None
    found = name.parent.module.members.get(name.name)
    if isinstance(found, griffe.Alias) and found.target_path.startswith("outboxq."):
        found = found.final_target
    return str(found.value) if isinstance(found, griffe.Attribute) else None


def _at_runtime(name: griffe.ExprName) -> object:
    module = importlib.import_module(name.parent.module.path)
    return getattr(module, name.name)


def _type(annotation: griffe.Expr | str | None) -> str:
    """A type, with the values of aliases of literals."""
    if not isinstance(annotation, griffe.Expr):
        return _quoted(str(annotation))
    parts = []
    for each in annotation.iterate(flat=True):
        alias = _constant(each) if isinstance(each, griffe.ExprName) else None
        parts.append(alias if alias is not None and alias.startswith("Literal[") else str(each))
    return _quoted("".join(parts))


def _shown(value: object) -> str:
    return _quoted(" ".join(str(value).split()))


def _quoted(text: str) -> str:
    return text if '"' in text else text.replace("'", '"')


def _is_typed_dict(found: griffe.Class) -> bool:
    return any(str(base) == "TypedDict" for each in (found, *found.mro()) for base in each.bases)


def _is_struct(found: griffe.Class) -> bool:
    return any(str(base) == "msgspec.Struct" for base in found.bases)


def _is_enum(found: griffe.Class) -> bool:
    return any(str(base) == "Enum" for base in found.bases)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _list(heading: str, items: Iterable[str]) -> str:
    return "\n".join([f"{heading}:", "", *items])


def _item(name: str, description: str) -> str:
    return _filled(f"- `{name}`: {_joined(description)}", "  ")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """A text for the cell of a table."""
    return text.replace("|", r"\|")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
