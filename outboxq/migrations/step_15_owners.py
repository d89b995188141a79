"""Step 15: whose code declares a schedule, and since when that code does not any more. Frozen.

Relays of the version before read and write schedules as before; one that is disabled is paused, which they heed.
Heartbeats read the table: it is changed under the lock that holds none of them up.
"""

from outboxq.migrations.step_07_checks import LOCK
from outboxq.migrations.step_13_ranges import FIRST, LAST

_LOCK = LOCK.replace(".job", ".schedule")

UP = f"""\
{_LOCK}
    ALTER TABLE @schema@.schedule
      -- The registry that declares it; NULL if operators made it, or code of before this step.
      ADD COLUMN owner text,
      -- When its owner's code was first seen without it. It is disabled while `paused_at` is this very time.
      ADD COLUMN disabled_at timestamptz,
      ADD CONSTRAINT schedule_owner_bytes CHECK (octet_length(owner) BETWEEN 1 AND 255),
      ADD CONSTRAINT schedule_disabled_ranges CHECK (disabled_at BETWEEN {FIRST} AND {LAST});"""

DOWN = f"""\
{_LOCK}
    ALTER TABLE @schema@.schedule DROP COLUMN owner, DROP COLUMN disabled_at;"""
