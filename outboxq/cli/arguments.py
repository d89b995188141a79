"""Options of commands that give jobs new arguments, and the check of these arguments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.errors import WrongUsage

if TYPE_CHECKING:
    from outboxq.admin.bulk import CheckArgs
    from outboxq.statements.paging import KindCount

Args = Annotated[
    str | None,
    typer.Option(
        "--args", metavar="JSON", help="Their arguments, all of them. With --app, or --unchecked.", show_default=False
    ),
]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="REGISTRY",
        help="The registry whose handlers the arguments have to fit, such as myapp.jobs:jobs.",
        show_default=False,
    ),
]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Take the arguments as they are.")]


@dataclass(frozen=True, slots=True)
class GivenArguments:
    """New arguments for jobs, as a command's options give them.

    Attributes:
        args: The arguments, as JSON; None if the jobs keep theirs.
        app: The registry whose handlers the arguments have to fit.
        unchecked: True to take the arguments without a check.
    """

    args: str | None
    app: str | None
    unchecked: bool

    def check_options(self) -> None:
        """Refuse options that do not go together, and arguments that are not a JSON object.

        Raises:
            WrongUsage: the options do not fit; the message says what to do.
        """
        import msgspec

        if self.args is None:
            if self.app is not None or self.unchecked:
                raise WrongUsage("--app and --unchecked are about --args")
            return
        if (self.app is None) is not self.unchecked:
            raise WrongUsage(
                "--args takes either --app, whose handlers say whether the arguments fit, or --unchecked: what does "
                "not fit fails when it runs"
            )
        try:
            msgspec.json.decode(self.args.encode(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise WrongUsage("--args takes a JSON object, such as '{\"user_id\": 7}'") from error

    def checker(self) -> "CheckArgs | None":
        """Return a function that refuses arguments that do not fit the handler of a kind; None if `--app` is not given.

        The handlers are those of the application that `--app` names; this method imports it.
        """
        if self.app is None:
            return None
        from outboxq.errors import PayloadError, UnknownKind
        from outboxq.handlers.loading import load_jobs

        registry = load_jobs(self.app).resolve()

        def check(kind: str, args: str) -> None:
            try:
                registry.check_args(kind, args)
            except (PayloadError, UnknownKind) as error:
                raise WrongUsage(f"the arguments do not fit: {error}") from error

        return check

    def check_kinds(self, kinds: "Iterable[KindCount]") -> None:
        """Refuse the arguments if they do not fit the handler of one of these kinds.

        Args:
            kinds: The kinds of the rows that the user has chosen.

        Raises:
            WrongUsage: the arguments do not fit.
        """
        check = self.checker()
        if check is not None and self.args is not None:
            for kind in sorted({each.kind for each in kinds}):
                check(kind, self.args)
