"""The pages of effects (calls to other services) and accepted messages, whose records prevent doing them twice."""

from dataclasses import dataclass, replace
from typing import Literal

from outboxq.admin.browse import find_effects, latest_messages
from outboxq.admin.effects import EffectFilter, EffectRecord, show_effect
from outboxq.admin.messages import MessageFilter, show_message
from outboxq.dashboard.parameters import Key, Limit, OfEffect, OfMessage, Scope
from outboxq.dashboard.payloads import without_bytes
from outboxq.dashboard.view import Look, View, flat

STATUSES = ("unknown", "started", "retryable", "done", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedEffects:
    """The parameters of the list of effects (calls to other services).

    Attributes:
        after_scope: The scope of the last effect of the previous page, after which this page begins.
        after_key: The key of that effect.
    """

    scope: Scope | None = None
    status: Literal["started", "retryable", "done", "unknown", "failed"] | None = None
    after_scope: Scope | None = None
    after_key: Key | None = None
    limit: Limit = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedMessages:
    """The parameters of the list of accepted messages."""

    consumer: Scope | None = None
    message_id: Key | None = None
    limit: Limit = 50


def show_effects(look: Look, asked: AskedEffects) -> View:
    """Return the list of effects (calls to other services) that match the filter.

    The first page without a filter begins with up to 20 effects whose outcome is unknown.
    """
    after = None if asked.after_scope is None or asked.after_key is None else (asked.after_scope, asked.after_key)
    wanted = EffectFilter(scope=asked.scope, status=asked.status)
    found = look.at("the calls", lambda c: find_effects(c, wanted, after=after, limit=asked.limit + 1)) or []
    effects = [_seen(look, each) for each in found[: asked.limit]]
    unknown: list[EffectRecord] = []
    if wanted == EffectFilter() and after is None:
        only = EffectFilter(status="unknown")
        unknown = [
            _seen(look, each)
            for each in look.at("calls of unknown outcome", lambda c: find_effects(c, only, limit=20)) or []
        ]
    data = {"effects": effects, "more": len(found) > asked.limit, "unknown": unknown}
    extra = {"statuses": STATUSES, "is_filtered": wanted != EffectFilter()}
    return View("effects.html", "Effects", data, extra)


def show_one_effect(look: Look, asked: OfEffect) -> View:
    """Return the page of one effect (a call to another service), with its result."""
    detail = show_effect(look.connection, asked.scope, asked.key)
    payloads = look.payloads
    result = None if detail.result is None else payloads.document(asked.scope, without_bytes(payloads, detail.result))
    data = flat(detail, result=result)
    data["error"] = payloads.text(detail.effect.error, payloads.secrets_of(detail.result))
    if payloads.mode != "shown":
        # The fingerprint is not shown: guesses at the call's arguments could be compared with it.
        data["fingerprint"] = None
    return View("effect.html", "Effect", data)


def show_messages(look: Look, asked: AskedMessages) -> View:
    """Return the list of the latest accepted messages that match the filter."""
    wanted = MessageFilter(consumer=asked.consumer, message_id=asked.message_id)
    found = look.at("the messages", lambda c: latest_messages(c, wanted, limit=asked.limit + 1)) or []
    data = {"messages": found[: asked.limit], "more": len(found) > asked.limit}
    return View("inbox.html", "Inbox", data, {"is_filtered": wanted != MessageFilter()})


def show_one_message(look: Look, asked: OfMessage) -> View:
    """Return the page of one accepted message."""
    message = show_message(look.connection, asked.consumer, asked.message_id)
    return View("message.html", "Message", flat(message))


def _seen(look: Look, effect: EffectRecord) -> EffectRecord:
    return replace(effect, error=look.payloads.text(effect.error))
