"""The dashboard: queues, jobs, dead letters and relays in a browser, mounted in an application or served by itself.

The dashboard reads the same data as the `outboxq` command line, by the same functions. It needs the extra
`outboxq[dashboard]`.
"""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg

try:
    import jinja2  # noqa: F401
    import starlette  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "outboxq.dashboard needs Starlette and Jinja2: pip install 'outboxq[dashboard]'", name=error.name
    ) from error

from outboxq.dashboard.app import DashboardApp as DashboardApp
from outboxq.dashboard.app import create_app as create_app
from outboxq.dashboard.logins import HeaderAuth as HeaderAuth
from outboxq.dashboard.logins import PasswordLogin as PasswordLogin
from outboxq.dashboard.logins import TokenLogin as TokenLogin
from outboxq.dashboard.roles import Role as Role
from outboxq.dashboard.roles import User as User
from outboxq.dashboard.settings import JobRef as JobRef
from outboxq.dashboard.settings import Link as Link

__all__ = [
    "DashboardApp",
    "HeaderAuth",
    "JobRef",
    "Link",
    "PasswordLogin",
    "Role",
    "TokenLogin",
    "User",
    "create_app",
]
