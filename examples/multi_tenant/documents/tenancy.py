"""Whose rows a transaction sees. No other module sets the tenant.

Row level security compares each row's tenant with the setting `app.tenant`. It is set for one transaction at a time, by
`set_config(..., true)`, which is SET LOCAL: a connection goes back to its pool without it.

Producers use `tenant_session`: its transactions are the tenant's, and so are the jobs that it adds. Handlers are
decorated with `of_tenant`. Several jobs may share a transaction, so the decorator takes the tenant away again behind
each: a handler that is not decorated sees nothing.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session

from outboxq import Context, JobHandle, JobKind, OutboxSession, PermanentError

P = ParamSpec("P")
T = TypeVar("T")

HEADER = "tenant"

# row_security_active: false for a role that row level security does not bind, such as a superuser.
SET_TENANT = text("SELECT set_config('app.tenant', :tenant, true), row_security_active('document')")


class NoTenant(PermanentError):
    """A job has no tenant: it was not added by a tenant's session."""


class NotSeparated(PermanentError):
    """This role sees the rows of all tenants."""


class TenantSession(OutboxSession):
    """A session of one tenant: what it reads and writes, and the jobs that it adds."""

    def add_job(self, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job of this tenant."""
        return super().add_job(for_tenant(kind, self.info[HEADER]), *args, **kwargs)


@event.listens_for(TenantSession, "after_begin")
def _set_tenant_of_session(session: Session, _transaction: object, connection: Connection) -> None:
    set_tenant(connection, session.info[HEADER])


def tenant_session(engine: Engine, tenant: str) -> TenantSession:
    """A session that sees the rows of one tenant, in every transaction."""
    if not tenant:
        raise ValueError("the tenant's name is empty")
    return TenantSession(engine, info={HEADER: tenant})


def for_tenant(kind: JobKind[P], tenant: str) -> JobKind[P]:
    """The kind with a tenant. In a handler, for the next job: `for_tenant(kind, ctx.headers[HEADER])`."""
    return kind.options(headers={**(kind.job_options.headers or {}), HEADER: tenant})


def of_tenant(function: Callable[Concatenate[Context, P], T]) -> Callable[Concatenate[Context, P], T]:
    """Have a handler in transaction mode see the rows of its job's tenant alone.

    Give it ids: an entity among its arguments is loaded before, when there is no tenant yet, and would not be found.
    What `ctx.defer` is given is sent behind it, when there is no tenant any more: execute it instead.
    """

    @functools.wraps(function)
    def handler(ctx: Context[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with rows_of_tenant(ctx):
            return function(ctx, *args, **kwargs)

    return handler


@contextmanager
def rows_of_tenant(ctx: Context[Any]) -> Iterator[None]:
    """Within the block the session sees the rows of the job's tenant; in lease mode, put it behind the call.

    Raises:
        NoTenant: the job has none.
        NotSeparated: the relay's role sees the rows of all tenants.
    """
    tenant = ctx.headers.get(HEADER)
    if not tenant:
        raise NoTenant(f"job {ctx.job.id} has no tenant: add it by a session of tenant_session()")
    set_tenant(ctx.session.connection(), tenant)
    yield
    # What still waits in the session is this tenant's too. If the block raises, the rollback takes the setting along.
    ctx.session.flush()
    set_tenant(ctx.session.connection(), "")


def set_tenant(connection: Connection, tenant: str) -> None:
    """Have the transaction see the rows of one tenant, or with an empty name of none.

    Raises:
        NotSeparated: this role would see the others too.
    """
    _, is_separated = connection.execute(SET_TENANT, {"tenant": tenant}).one()
    if not is_separated:
        raise NotSeparated(
            "row level security does not bind this role, so it would see the rows of all tenants: "
            "connect as a role that is no superuser and has no BYPASSRLS"
        )
