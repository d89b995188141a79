"""Classes of commands for typer with plainer help: arguments described, no nested brackets, commands by purpose."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

# The contexts, formatters and parameters of typer are classes of its own, which it does not export: hence Any.
_RANGES = ((re.compile(r"(-?[\d.]+)<=x<=(-?[\d.]+)"), r"\1 to \2"), (re.compile(r"x>=(-?[\d.]+)"), r"at least \1"))
_WHOLE_SENTENCE = 1_000


class PlainCommand(TyperCommand):
    """A command whose help is easier to read than typer's.

    The line of usage has `NAME` and `[ID]...` without further brackets, and arguments are described as options are.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Called by typer: return the words of the usage line, without braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by typer: write the arguments and the options, each with its description."""
        params: list[Any] = self.get_params(ctx)
        arguments = [(param.metavar, param.help) for param in params if _is_argument(param)]
        records = (param.get_help_record(ctx) for param in params if not _is_argument(param))
        options = [(name, _plain(text)) for name, text in records]
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class PlainGroup(TyperGroup):
    """A group of commands, each listed with the whole first sentence of its help.

    Attributes:
        sections: The names of commands by heading, such as `jobs list` for a command of a subgroup. If it is empty, the
            help lists the group's own commands.
    """

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # the signature that typer calls
        """Called by typer: write the commands into the help, under the headings of `sections`."""
        for heading, names in (self.sections or {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                formatter.write_dl([(name, _first_sentence(self, name)) for name in names])


class Commands(typer.Typer):
    """A typer application whose commands have the plainer help of `PlainCommand`."""

    def __init__(self, cls: type[PlainGroup] = PlainGroup, **settings: Any) -> None:
        # Plain help: rich's takes twice as long to import. No pretty tracebacks: they print local variables.
        super().__init__(
            cls=cls, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return a decorator that makes a function a command of this name, with plain help."""
        return super().command(name, cls=PlainCommand, **settings)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _plain(text: str) -> str:
    for written, said in _RANGES:
        text = written.sub(said, text)
    return text


def _first_sentence(group: Any, name: str) -> str:
    found = group
    for word in name.split():
        found = found.commands[word]
    return str(found.get_short_help_str(_WHOLE_SENTENCE))
