"""`tests/support/faulty.py` for a relay process whose transactions the server ends soon. Named, never imported."""

import outboxq.statements.session
from tests.support.faulty import jobs as jobs

# Instead of ten seconds.
outboxq.statements.session.IDLE_GRACE_SECONDS = 0.5
