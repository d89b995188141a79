"""`publish`: an event, with a delivery and its job for each endpoint, in one transaction."""

import json
from collections.abc import Mapping

from sqlalchemy import select

from outboxq import OutboxSession

from .jobs import deliver
from .models import Delivery, Endpoint, Event


def publish(session: OutboxSession, event_type: str, data: Mapping[str, object]) -> int:
    """Add the event to the unit of work; the number of endpoints that it will be sent to.

    It is sent if the transaction commits, to the endpoints that were active in it.
    """
    event = Event(type=event_type, body=json.dumps({"type": event_type, "data": data}))
    endpoints = session.scalars(select(Endpoint).where(Endpoint.is_active).order_by(Endpoint.id)).all()
    session.add(event)
    session.flush()
    deliveries = [Delivery(event_id=event.id, endpoint_id=endpoint.id) for endpoint in endpoints]
    session.add_all(deliveries)
    session.flush()
    session.add_jobs(
        deliver.job(delivery.id, endpoint.id, endpoint.url, event.body)
        for delivery, endpoint in zip(deliveries, endpoints, strict=True)
    )
    return len(deliveries)
