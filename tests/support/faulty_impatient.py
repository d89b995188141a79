"""`tests/support/faulty.py` for a relay process whose transactions the server ends soon. Named, never imported."""

import outboxq.statements.transaction
from tests.support.faulty import jobs as jobs

# Instead of ten seconds.
outboxq.statements.transaction.IDLE_GRACE_SECONDS = 0.5
