"""Step 10: validates the checks of step 9 for all rows. Frozen.

It reads the table once, while jobs run: neither claims nor producers wait, if step 9 was committed before.
"""

from outboxq.migrations.step_07_checks import LOCK
from outboxq.migrations.step_09_flow import CHECKS

UP = """\
    ALTER TABLE @schema@.job
      VALIDATE CONSTRAINT job_state, VALIDATE CONSTRAINT job_groups, VALIDATE CONSTRAINT job_expiry;"""

DOWN = f"""\
{LOCK}
    ALTER TABLE @schema@.job DROP CONSTRAINT job_state, DROP CONSTRAINT job_groups, DROP CONSTRAINT job_expiry,
{CHECKS};"""
