"""The doctor: examines a database, and reports conditions that keep jobs from running now or later, with advice.

It only reads: each check is a short READ ONLY transaction of its own that waits for no lock. A check that this role may
not make is reported as a finding, and raises no error.
"""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
from outboxq.doctor.checks import run_checks as run_checks
from outboxq.doctor.findings import Finding as Finding
from outboxq.doctor.findings import Limits as Limits
from outboxq.doctor.findings import Severity as Severity
from outboxq.doctor.pooler import unreachable as unreachable

__all__ = ["Finding", "Limits", "Severity", "run_checks", "unreachable"]
