"""`tests/support/held_app.py` for a relay whose pace does not depend on the machine's. Named, never imported."""

import outboxq.held
from tests.support.held_app import jobs as jobs

# Claims grow, and are not relieved, however slow their handlers are.
outboxq.held.AIM_SECONDS = outboxq.held.HELD_SECONDS = 3600.0
