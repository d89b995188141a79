"""A claimed job."""

from datetime import datetime
from uuid import UUID

import msgspec


# A struct, as a claim makes one for each of its jobs: in a third of a frozen dataclass's time, and nothing that the
# garbage collector has to walk.
class Job(msgspec.Struct, frozen=True, gc=False):
    """A claimed job, as its handler sees it in `ctx.job`. Its payload and its errors are not in its `repr`.

    `attempt` counts from 1 and includes this run. `args` is the stored JSON text; handlers receive it decoded.
    `max_attempts` is None if the handler's own retry policy decides. `crashes` is how often its relay died while it
    ran alone, before this run. `lease_token` is None in transaction mode. Times are the database's, in UTC.
    """

    id: UUID
    queue: str
    kind: str
    args: str
    headers: str
    priority: int
    attempt: int
    max_attempts: int | None
    crashes: int
    parked: int
    unique_key: str | None
    group_key: str | None
    errors: str
    run_at: datetime
    created_at: datetime
    seq: int
    lease_token: int | None = None

    def __repr__(self) -> str:
        shown = (name for name in self.__struct_fields__ if name not in ("args", "headers", "errors"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
