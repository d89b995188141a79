"""`tests/support/leased_app.py` for a relay whose pace does not depend on the machine's. Named, never imported."""

import outboxq.execution.lease_mode
from tests.support.leased_app import jobs as jobs

# Claims grow, and are not released, however slow their handlers are.
outboxq.execution.lease_mode.AIM_SECONDS = outboxq.execution.lease_mode.HELD_SECONDS = 3600.0
