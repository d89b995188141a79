"""The objects that pages and actions of one database share: settings, known kinds, and the signer of previews."""

from dataclasses import dataclass, field
from functools import cached_property
from inspect import cleandoc
from typing import TYPE_CHECKING

from outboxq.dashboard.intents import Intents
from outboxq.dashboard.payloads import Payloads
from outboxq.dashboard.settings import Settings
from outboxq.handlers.registry import Jobs

if TYPE_CHECKING:
    from outboxq.admin.bulk import CheckArgs
    from outboxq.handlers.resolved import Registry

_MAX_DOC_CHARACTERS = 2_000


@dataclass(frozen=True)
class KnownKinds:
    """The kinds of jobs that the application's registry has handlers for, to warn of kinds without a handler.

    Without a registry, no kind counts as missing.

    Raises:
        RegistryError: on the first use, if the registry cannot be used.
    """

    jobs: Jobs | None = field(default=None, repr=False)

    @property
    def is_given(self) -> bool:
        """Return True if the application has given a registry."""
        return self.jobs is not None

    @cached_property
    def _registry(self) -> "Registry | None":
        # Read late: an application may still be declaring handlers when it makes its dashboard.
        return None if self.jobs is None else self.jobs.resolve()

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds that the registry has handlers for, sorted, without aliases; empty without a registry."""
        return () if self._registry is None else tuple(sorted({each.kind for each in self._registry.handlers.values()}))

    def lacks(self, kind: str) -> bool:
        """Return True if the application's registry has no handler of this kind. Without a registry return False."""
        return self._registry is not None and kind not in self._registry.handlers

    def doc(self, kind: str) -> str | None:
        """Return the docstring of a kind's handler, up to 2,000 characters; None if there is none."""
        handler = None if self._registry is None else self._registry.handlers.get(kind)
        said = None if handler is None else handler.function.__doc__
        return None if not said else cleandoc(said)[:_MAX_DOC_CHARACTERS]

    @property
    def check(self) -> "CheckArgs | None":
        """A function that raises an error if arguments do not fit the handler of a kind; None without a registry."""
        return None if self._registry is None else self._registry.check_args


@dataclass(frozen=True, slots=True)
class Desk:
    """The objects that all requests about one database share.

    They are the settings, the rules for showing payloads, the known kinds, and the signer of previews.
    """

    settings: Settings
    payloads: Payloads
    kinds: KnownKinds
    intents: Intents
