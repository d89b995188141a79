"""The forms of actions: each has a page of its own at the action's path, which also shows its errors.

The declaration of a form is the source of its page, the links to that page, and the list of fields for programs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from outboxq.dashboard.view import Look, View

Kind: TypeAlias = Literal["text", "lines", "number", "choice", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of an action's form, from which the form's page makes an input.

    Attributes:
        kind: The sort of input.
        options: For the kind `choice`: each value, and the words shown for it.
        help: A sentence about the values that the field takes, shown below it.
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
    """The subject of a form, such as the one job that it changes, and the parts of the form that depend on the subject.

    Attributes:
        name: The name or id of the job, queue or schedule.
        back: The path of the subject's page, below the database's path.
        values: The initial values of the fields.
        notes: Sentences that the user should read before sending the form.
        without: The names of the form's fields that do not apply to this subject.
    """

    name: str
    back: str
    values: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of an action, from which the form's page is made.

    Attributes:
        means: A description of the action's effect, in one or two sentences.
        button: The words on the button, and on the link that leads to the form.
        about: A function that reads the form's subject, and raises an error if the subject does not exist.
        is_grave: True if the action cannot be undone.
    """

    title: str
    means: str
    button: str
    about: Callable[[Look, Any], About]
    fields: tuple[Field, ...] = ()
    needs_reason: bool = False
    is_grave: bool = False

    def fields_for(self, about: About) -> tuple[Field, ...]:
        """Return the fields to show for a subject: the form's fields that apply to it, then that for the reason."""
        reason = replace(REASON, is_required=self.needs_reason)
        return (*(each for each in self.fields if each.name not in about.without), reason)


def show_form(look: Look, asked: Any, *, form: Form, name: str) -> View:
    """Return the page of an action's form, for the job, queue or other subject that the path names (`asked`).

    Args:
        name: The name of the action that the form sends.
    """
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
