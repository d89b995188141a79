"""Step 8: repairs the rows that break the checks of step 7, and validates the checks for all rows. Frozen.

It reads the table once, while jobs run: neither claims nor producers wait, if step 7 was committed before.
"""

from outboxq.migrations.repair import REPAIR_ALL
from outboxq.migrations.step_07_checks import CHECKS, LOCK

UP = f"""\
{REPAIR_ALL}
    ALTER TABLE @schema@.job
      VALIDATE CONSTRAINT job_numbers, VALIDATE CONSTRAINT job_lease, VALIDATE CONSTRAINT job_sizes;"""

DOWN = f"""\
{LOCK}
    ALTER TABLE @schema@.job DROP CONSTRAINT job_numbers, DROP CONSTRAINT job_lease, DROP CONSTRAINT job_sizes,
{CHECKS};"""
