"""The forms of actions: each has a page of its own at the action's path, which also shows its errors.

A form names its fields; the page, its link on other pages and what a program may send are all made of that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from outboxq.dashboard.view import Look, View

Kind: TypeAlias = Literal["text", "lines", "number", "choice", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a form.

    Attributes:
        options: The values of a choice, each with its words.
        help: The values that it takes, written below it.
    """

    name: str
    label: str
    kind: Kind = "text"
    options: tuple[tuple[str, str], ...] = ()
    help: str = ""
    is_required: bool = False
    max_length: int = 500


REASON = Field(name="reason", label="Reason", help="Why: kept in the audit.", max_length=500)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The subject of a form.

    Attributes:
        name: The job, the queue, the schedule.
        back: Its page, below the database's.
        values: The initial values of the fields.
        notes: Sentences to read before.
        without: Fields that do not apply.
    """

    name: str
    back: str
    values: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form.

    Attributes:
        means: The effect of the action, in one or two sentences.
        button: The words on the button, and on the link that leads here.
        about: Reads its subject; raises an error if that does not exist.
        is_grave: True if it cannot be taken back.
    """

    title: str
    means: str
    button: str
    about: Callable[[Look, Any], About]
    fields: tuple[Field, ...] = ()
    needs_reason: bool = False
    is_grave: bool = False

    def fields_for(self, about: About) -> tuple[Field, ...]:
        """The fields that apply, and the reason."""
        reason = replace(REASON, is_required=self.needs_reason)
        return (*(each for each in self.fields if each.name not in about.without), reason)


def show_form(look: Look, asked: Any, *, form: Form, name: str) -> View:
    """The page of a form."""
    about = form.about(look, asked)
    fields = form.fields_for(about)
    data = {
        "action": name,
        "of": about.name,
        "means": form.means,
        "notes": about.notes,
        "fields": [{"name": each.name, "required": each.is_required} for each in fields],
    }
    return View("act.html", form.title, data, {"form": form, "about": about, "fields": fields})
