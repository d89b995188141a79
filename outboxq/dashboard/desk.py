"""The common things of pages and actions of one database: the settings, the known kinds, and the seal of previews."""

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
    """The kinds that an application's registry has handlers for; without a registry, none counts as missing.

    Raises:
        RegistryError: on the first use, if the registry cannot be used.
    """

    jobs: Jobs | None = field(default=None, repr=False)

    @property
    def is_given(self) -> bool:
        """Return True if there is a registry."""
        return self.jobs is not None

    @cached_property
    def _registry(self) -> "Registry | None":
        # Late: an application may still be declaring handlers when it makes its dashboard.
        return None if self.jobs is None else self.jobs.resolve()

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds, without their aliases."""
        return () if self._registry is None else tuple(sorted({each.kind for each in self._registry.handlers.values()}))

    def lacks(self, kind: str) -> bool:
        """Return True if there is a registry, and it has no handler of this kind."""
        return self._registry is not None and kind not in self._registry.handlers

    def doc(self, kind: str) -> str | None:
        """The docstring of a kind's handler."""
        handler = None if self._registry is None else self._registry.handlers.get(kind)
        said = None if handler is None else handler.function.__doc__
        return None if not said else cleandoc(said)[:_MAX_DOC_CHARACTERS]

    @property
    def check(self) -> "CheckArgs | None":
        """The function that refuses arguments that do not fit the handler of a kind."""
        return None if self._registry is None else self._registry.check_args


@dataclass(frozen=True, slots=True)
class Desk:
    """The objects that all requests about one database share."""

    settings: Settings
    payloads: Payloads
    kinds: KnownKinds
    intents: Intents
