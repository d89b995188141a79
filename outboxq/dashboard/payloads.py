"""Payloads (arguments, headers, results, error texts), and the removal of secrets from them before a page is made.

In the mode `redacted`, the values of secret keys such as `password` are hidden, at any depth, also in JSON inside a
string. Error texts are shown without these values, and without the text after words such as `password=`. In the mode
`hidden` nothing of a payload is shown. The application's own hook `redact` is called last: it can hide more, and
searches do not find what it hides.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from outboxq.codec.text import escaped_json
from outboxq.dashboard.documents import TooDeep, Tree, change_strings, check_depth, read_tree, write_tree

Mode: TypeAlias = Literal["redacted", "hidden", "shown"]
# Called with the kind of a job and its arguments; returns them without secrets.
Redact: TypeAlias = Callable[[str, Any], Any]

MASK = "•••"
_WORDS = (
    r"pass_?(?:word|wd|phrase|code)|passwd|pwd|secret|token|auth(?:orization)?|credentials?|api_?-?key|private_?-?key|access_?-?key|pw|"
    r"cookie|session_?id|signature|card|cvc|cvv|iban|bic|ssn|otp|pin"
)
# A key is taken apart at underscores, dashes and capitals, so that `pin` does not hide `shipping`.
_SECRET_KEY = re.compile(rf"(?:^|_)(?:{_WORDS})s?(?:$|_)|(?:^|_)pass$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ALWAYS = re.compile(r"password|passwd|secret|token|authorization|api_?key|card|iban|ssn")
# Every part is bounded or ends for good, so that matching takes linear time: strangers write arguments, and a match
# blocks every Python thread.
_SEPARATOR = re.compile(r"\\{0,4}[\"']?\s{0,8}(?:=>|[=:])\s{0,8}")
_WORD_BEFORE = re.compile(r"(?<![\w-])[\w-]+\Z")
_VALUE = re.compile(
    rf"{MASK}|\\{{1,4}}\"[^\"]*\"?|\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|(?i:bearer|basic)\s+\S+|[^\s,;&}}]+",
    re.DOTALL,
)
_MAX_WORD_CHARACTERS = 64
_WITHOUT_SPACES = re.compile(r"\S+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+([A-Za-z0-9._~+/=-]{8,})")
# Documents that hold a name and its value under two keys, as {"name": "password", "value": "..."} does.
_NAMES, _VALUES = ("name", "key", "header", "field"), ("value", "values")
# A reason without the error's text, which may contain values.
_SAFE_REASON = re.compile(
    r"gave up after \d+ of \d+ attempts: [A-Za-z_][\w.]*|another attempt cannot help: [A-Za-z_][\w.]*|"
    r"crashed \d+ of \d+ times while it ran alone\Z|cancelled\Z"
)
_TYPE_NAME = re.compile(r"[A-Za-z_][\w.]*")
_MIN_HIDDEN_CHARACTERS = 4
# A text of this length may have been cut when it was stored or sent: notes have the lowest limit.
_CUT_FROM_CHARACTERS = 200
# If a job has more secret values than this, no text is shown: each text would be searched for each value.
_MOST_HIDDEN = 1_000
_MAX_SHOWN_CHARACTERS = 200_000


def is_secret(key: str) -> bool:
    """Return True if a key's name says that its value is secret, as `password` does."""
    words = _CAPITAL.sub("_", key).replace("-", "_").replace(".", "_").lower()
    return _ALWAYS.search(words) is not None or _SECRET_KEY.search(words) is not None


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON payload, such as a job's arguments, reduced to the part that may be shown.

    Attributes:
        pretty: That part as JSON over several lines, for a page; empty if nothing may be shown.
        raw: That part as JSON for programs; null if nothing may be shown.
        why: The reason why nothing, or not everything, is shown; None if everything is.
    """

    pretty: str = field(repr=False)
    raw: str = field(repr=False)
    why: str | None = None


def withheld(why: str) -> Document:
    """Return a document that shows nothing but the reason `why`."""
    return Document("", "null", why)


def _document(pretty: str, raw: str) -> Document:
    if len(pretty) <= _MAX_SHOWN_CHARACTERS:
        return Document(escaped_json(pretty), raw)
    cut = f"{_MAX_SHOWN_CHARACTERS:,} of {len(pretty):,} characters are shown"
    return Document(escaped_json(pretty[:_MAX_SHOWN_CHARACTERS]), raw, cut)


@dataclass(frozen=True, slots=True)
class Payloads:
    """The rules by which payloads (arguments, headers, results, error texts) are shown.

    Args:
        mode: `redacted` hides the values of secret keys, `hidden` hides all payloads, and `shown` hides nothing.
        redact: The application's own hook, called with a kind and its arguments; returns the arguments to show. If it
            fails, nothing is shown.
    """

    mode: Mode = "redacted"
    redact: Redact | None = None

    @property
    def may_search(self) -> bool:
        """Return True if arguments may be searched.

        In the mode `hidden` they may not: results would reveal their contents.
        """
        return self.mode != "hidden"

    def document(self, kind: str, text: str, *, hook: bool = False) -> Document:
        """Return a payload of a job of this kind, as far as it may be shown.

        Args:
            text: The payload as JSON.
            hook: True to call the application's hook too. For arguments only: the hook knows no other payloads.
        """
        if self.mode == "hidden":
            return withheld("hidden")
        try:
            seen = self._seen(kind, read_tree(text), hook=hook)
            return _document(write_tree(seen, indent=2), write_tree(seen))
        except TooDeep as error:
            return withheld(str(error))
        except HookFailed as error:
            return withheld(str(error))
        except (ValueError, TypeError):
            return withheld("it cannot be read")

    def callback(self, kind: str, text: str) -> Document:
        """Return a batch's callback (the job that runs once the batch's jobs have ended), as far as it may be shown.

        The application's hook is called with the callback's arguments.
        """
        try:
            job = read_tree(text)
        except ValueError:
            return withheld("it cannot be read")
        if not isinstance(job, dict) or "args" not in job or self.mode == "hidden":
            return self.document(kind, text)
        try:
            # The whole is redacted once more, because of the options.
            return self.document(kind, write_tree({**job, "args": self._seen(kind, job["args"], hook=True)}))
        except HookFailed as error:
            return withheld(str(error))
        except (ValueError, TypeError):
            return withheld("it cannot be read")

    def _seen(self, kind: str, tree: Tree, *, hook: bool) -> Any:
        seen = redacted(tree) if self.mode == "redacted" else tree
        if not hook or self.redact is None:
            return seen
        try:
            return self.redact(kind, seen)
        except Exception as error:  # noqa: BLE001  # users' code, whose error may have the secrets
            raise HookFailed(f"hidden, because the hook `redact` failed: {type(error).__name__}") from None

    def seen_args(self, kind: str, text: str) -> Any:
        """Return a job's arguments (JSON in `text`) without secrets; None if they are hidden or cannot be read."""
        if self.mode == "hidden":
            return None
        try:
            return self._seen(kind, read_tree(text), hook=True)
        except (ValueError, HookFailed):
            return None

    def still_has(self, kind: str, text: str, path: Sequence[str], wanted: Sequence[object]) -> bool:
        """Return True if the arguments, once secrets are removed, have one of the wanted values at this path of keys.

        A search uses it to leave out jobs that match only by a hidden value.
        """
        found = at_path(self.seen_args(kind, text), path)
        return any(found == each and isinstance(found, bool) is isinstance(each, bool) for each in wanted)

    def text(self, said: str | None, hidden: Sequence[str] = ()) -> str | None:
        """Return an error's text, or a job's note, without secrets.

        In the mode `hidden`, or if the job has over 1,000 hidden values, return a mask instead.

        Args:
            hidden: The hidden values of the same job, as `secrets_of` finds them.
        """
        if said is None or self.mode == "shown":
            return said
        if not self.knows(hidden):
            return MASK
        return without_secrets(said, hidden)

    def knows(self, hidden: Sequence[str] | None) -> bool:
        """Return True if the hidden values of a job can be removed from its texts, so that the texts may be shown.

        That is possible in the mode `redacted`, if the values were read and are at most 1,000.

        Args:
            hidden: The hidden values of the job; None if they were not read.
        """
        return self.mode == "redacted" and hidden is not None and len(hidden) <= _MOST_HIDDEN

    def reason(self, said: str, hidden: Sequence[str] | None = None) -> str:
        """Return the reason why a job died, without secrets.

        If the hidden values are not known, or in the mode `hidden`, only the part before the error's text is returned,
        such as the number of attempts and the error's type. If there is no such part, a mask is returned.

        Args:
            hidden: The hidden values of the same job; None if they were not read.
        """
        if self.mode == "shown":
            return said
        if hidden is not None and self.knows(hidden):
            return without_secrets(said, hidden)
        found = _SAFE_REASON.match(said)
        return found.group() if found else MASK

    def error(self, said: str) -> str:
        """Return the error by which dead letters are grouped, as far as it may be shown.

        An exception's type is shown. Jobs that died without an exception are grouped by their reason, which is
        redacted.
        """
        return said if _TYPE_NAME.fullmatch(said) else self.reason(said)

    def secrets_of(self, *texts: str | None) -> tuple[str, ...]:
        """Return the values that are hidden in these documents, the longest first, to remove them from error texts.

        Values of fewer than four characters are left out: they may occur in any text.
        """
        if self.mode != "redacted":
            return ()
        found: set[str] = set()
        for text in texts:
            try:
                redacted(read_tree(text or "null"), taken=found)
            except ValueError:
                continue
        # A value may be masked in part by now, such as that of a header: the remaining part counts too.
        known = (each for each in found if len(each) >= _MIN_HIDDEN_CHARACTERS and MASK not in each)
        return tuple(sorted(known, key=len, reverse=True))


def at_path(tree: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys in a document; None if there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


class HookFailed(Exception):
    """Raised if the application's hook `redact` raises an error: the payload is then not shown."""


def redacted(tree: Tree, depth: int = 0, taken: set[str] | None = None) -> Tree:
    """Return a document with a mask in place of the values of secret keys.

    Args:
        taken: A set to which this function adds the values that it has masked.
    """
    check_depth(depth)
    if isinstance(tree, dict):
        is_named = any(is_secret(name) for each in _NAMES if isinstance(name := tree.get(each), str))
        return {
            key: _masked(value, depth, taken)
            if is_secret(key) or (is_named and key in _VALUES)
            else redacted(value, depth + 1, taken)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [
            _masked(each, depth, taken) if _is_named(tree, at) else redacted(each, depth + 1, taken)
            for at, each in enumerate(tree)
        ]
    return _redacted_text(tree, depth, taken) if isinstance(tree, str) else tree


def _is_named(values: list[Tree], at: int) -> bool:
    """Return True if an element of a list is secret because the element before it is the name of a secret.

    Examples are the second of a pair such as ["X-Api-Key", "..."], and the element after a word such as --password.
    """
    name = values[at - 1] if at else None
    return isinstance(name, str) and (len(values) == 2 or name.startswith("-")) and is_secret(name)


def _masked(tree: Tree, depth: int, taken: set[str] | None) -> str:
    if taken is not None:
        taken.update(_leaves(tree, depth))
    return MASK


def _redacted_text(text: str, depth: int, taken: set[str] | None) -> str:
    """Return a string of a document without secrets: JSON is redacted like a document, other text like an error's."""
    if text.lstrip()[:1] in ("{", "[", '"'):
        try:
            inner = read_tree(text)
        except ValueError:
            return without_secrets(text, ())
        # The JSON is written again even if nothing was removed: if a key appears twice, only its last value was
        # checked.
        return write_tree(redacted(inner, depth + 1, taken))
    return without_secrets(text, (), taken)


def without_secrets(text: str, hidden: Sequence[str], taken: set[str] | None = None) -> str:
    """Return a text with masks in place of its secrets.

    Secrets are the values in `hidden`, the passwords of URLs, and the text after a word such as `password=`.

    Args:
        hidden: The values to mask.
        taken: A set to which this function adds the secrets that it has found in URLs or after words.
    """
    out: set[str] = set() if taken is None else taken
    for value in hidden:
        text = text.replace(value, MASK)
    if hidden and len(text) >= _CUT_FROM_CHARACTERS:
        text = _without_cut(text, hidden)
    if "://" in text:
        text = _WITHOUT_SPACES.sub(lambda found: _without_url_password(found, out), text)
    return _without_named(_BEARER.sub(lambda found: _without_bearer(found, out), text), out)


def _without_cut(text: str, hidden: Sequence[str]) -> str:
    """Mask the beginning of a hidden value at the end of a text that was cut within this value."""
    end = text.removesuffix("...")
    tail = end[-_CUT_FROM_CHARACTERS:]
    begun = (value for value in hidden if value[:_MIN_HIDDEN_CHARACTERS] in tail)
    longest = max((_common(tail, value) for value in begun), default=0)
    return text if longest == 0 else f"{end[:-longest]}{MASK}{text[len(end) :]}"


def _common(end: str, value: str) -> int:
    """Return the length of the longest prefix of `value` that `end` ends with; 0 if the length is less than four."""
    most = min(len(end), len(value) - 1)
    return next((size for size in range(most, _MIN_HIDDEN_CHARACTERS - 1, -1) if end.endswith(value[:size])), 0)


def _without_bearer(found: re.Match[str], taken: set[str]) -> str:
    taken.add(found[2])
    return f"{found[1]} {MASK}"


def _without_url_password(found: re.Match[str], taken: set[str]) -> str:
    """Return the matched part of a text; if it is a URL, its password is masked. The password ends at the last @."""
    before, scheme, rest = found.group().partition("://")
    user, colon, password = rest.rpartition("@")[0].partition(":")
    if not colon:
        return found.group()
    taken.add(password)
    return f"{before}{scheme}{user}:{MASK}@{rest.rpartition('@')[2]}"


def _without_named(text: str, taken: set[str]) -> str:
    """Mask each value in a text that follows a secret word and a separator, as in `password=...`."""
    parts: list[str] = []
    end = 0
    for found in _SEPARATOR.finditer(text):
        start = found.start()
        if start < end:
            continue
        word = _WORD_BEFORE.search(text[max(end, start - _MAX_WORD_CHARACTERS) : start])
        value = _VALUE.match(text, found.end()) if word is not None and is_secret(word.group()) else None
        if value is not None:
            parts += [text[end : found.end()], MASK]
            end = value.end()
            taken.add(value.group().strip("\"'\\"))
    return "".join([*parts, text[end:]])


def _leaves(tree: Tree, depth: int) -> Iterator[str]:
    check_depth(depth)
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each, depth + 1)
    elif tree is not None and not isinstance(tree, bool):
        yield tree if isinstance(tree, str) else write_tree(tree)


def without_bytes(payloads: Payloads, text: str) -> str:
    """Return a stored HTTP response (JSON text) with a mask in place of a binary body.

    A binary body is hidden whole, because secrets in it cannot be found.
    """
    try:
        tree = read_tree(text)
    except ValueError:
        return text
    if payloads.mode == "shown" or not isinstance(tree, dict) or "base64" not in tree:
        return text
    return write_tree({**tree, "base64": MASK})


def hide_errors(payloads: Payloads, errors: str, hidden: Sequence[str]) -> str:
    """Return the JSON of a job's failed attempts with secrets removed from each error text.

    The types and code locations of the errors stay. If the JSON cannot be read, return an empty list as JSON.
    """
    if payloads.mode == "shown":
        return errors
    try:
        records = read_tree(errors)
        seen = _hide_texts(payloads, records, tuple(hidden), 0)
        return write_tree(seen)
    except (ValueError, msgspec.MsgspecError):
        return "[]"


def _hide_texts(payloads: Payloads, tree: Tree, hidden: tuple[str, ...], depth: int) -> Tree:
    check_depth(depth)
    if isinstance(tree, list):
        return [_hide_texts(payloads, each, hidden, depth + 1) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: change_strings(value, lambda text: payloads.text(text, hidden) or "")
        if key in ("message", "notes")
        else _hide_texts(payloads, value, hidden, depth + 1)
        for key, value in tree.items()
    }
