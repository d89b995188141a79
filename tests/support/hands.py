"""An operator at the browser: with a pointer, or with the keyboard alone."""

from playwright.sync_api import Locator, Page, expect

# A page with so many places to stop at has no good order.
_MOST_TABS = 150


class Pointer:
    """An operator who clicks. `page` shows what is followed and pressed, by the names that a screen reader says."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def follow(self, name: str, *, within: Locator | None = None, exact: bool = True) -> None:
        """Follow the first link of this name."""
        self._press((within or self.page.locator("body")).get_by_role("link", name=name, exact=exact).first)

    def screen(self, name: str) -> None:
        """Go to a screen by the navigation."""
        self.follow(name, within=self.page.get_by_role("navigation", name="Screens"))
        expect(self.page.locator(".side [aria-current]")).to_have_text(name)

    def press(self, name: str, *, within: Locator | None = None) -> None:
        """Press a button, the first of this name."""
        place = within or self.page.get_by_role("main")
        self._press(place.get_by_role("button", name=name).first)

    def write(self, label: str, text: str) -> None:
        """Write into a field."""
        self.page.get_by_role("main").get_by_label(label).first.fill(text)

    def choose(self, label: str, option: str) -> None:
        """Choose from a list."""
        self.page.get_by_role("main").get_by_label(label).first.select_option(label=option)

    def read(self, name: str) -> Locator:
        """The row of a table that has this in it."""
        return self.page.get_by_role("row").filter(has_text=name).first

    def told(self, text: str) -> None:
        """Wait for the word on what was done."""
        expect(self.page.get_by_role("status").first).to_contain_text(text)

    def _press(self, target: Locator) -> None:
        target.click()


class Keyboard(Pointer):
    """An operator who has no pointer: everything is reached by Tab, and pressed by Enter."""

    def write(self, label: str, text: str) -> None:
        self._reach(self.page.get_by_role("main").get_by_label(label).first)
        self.page.keyboard.type(text)

    def choose(self, label: str, option: str) -> None:
        self._reach(self.page.get_by_role("main").get_by_label(label).first)
        # A list goes to the option that begins with what is typed.
        self.page.keyboard.type(option)

    def _press(self, target: Locator) -> None:
        self._reach(target)
        self.page.keyboard.press("Enter")

    def _reach(self, target: Locator) -> None:
        """Go on with Tab until the target has the focus, which must be seen."""
        expect(target).to_be_visible()
        for _ in range(_MOST_TABS):
            self.page.keyboard.press("Tab")
            if target.evaluate("element => element === document.activeElement"):
                ring = target.evaluate("element => getComputedStyle(element).outlineStyle")
                assert ring != "none", f"no ring shows the focus on {target}"
                return
        raise AssertionError(f"{target} is not reached by Tab")
