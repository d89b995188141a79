"""Texts from anywhere, for a terminal or a line of a log."""


def printable(text: str) -> str:
    """`text` with an escape for each character that is not printable, such as a newline or what a terminal acts on."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
