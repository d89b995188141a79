"""The rules and the board that are shipped: valid, each alert tried both ways, and about series that there are."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from outboxq.observability.metrics.families import FAMILIES, Family
from outboxq.observability.metrics.shipped import dashboard, rules
from tests.observability.alert_cases import CASES, MORE
from tests.support.cli import REPOSITORY, call
from tests.support.metrics import promtool

ALERTS = re.findall(r"^ +- alert: (\w+)$", rules(), re.MULTILINE)
# Labels that Prometheus itself gives.
OF_PROMETHEUS = {"instance", "le"}
SERIES = re.compile(r"(outboxq_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def expressions() -> list[str]:
    board = json.loads(dashboard())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    # An expression of the rules is on its line, or folded below it.
    found = re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)(?=\n +(?:for|labels):)", rules())
    return [*shown, *(" ".join(text.split()) for text in found)]


def family_of(name: str) -> Family:
    found = FAMILIES.get(name) or FAMILIES[re.sub(r"_(bucket|sum|count)$", "", name)]
    assert name == found.name or found.type == "histogram"
    return found


def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    """With the syntax, and with what a linter of Prometheus knows; a mistake is found."""
    path = tmp_path / "outboxq.rules.yml"
    path.write_text(call("metrics", "--print", "rules").ok().stdout)
    checked = promtool("check", "rules", path)
    assert checked.returncode == 0, checked
    assert f"{len(ALERTS)} rules found" in checked.stdout
    path.write_text(rules().replace("sum by (database)", "sum by (database"))
    assert promtool("check", "rules", path).returncode != 0


def test_every_alert_is_tried_both_ways() -> None:
    """A new alert needs two cases, and a section of the runbooks."""
    assert list(CASES) == ALERTS
    page = (REPOSITORY / "docs" / "runbooks.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == ALERTS
    assert re.findall(r"runbook_url: docs/runbooks\.md#(\w+)", rules()) == [name.lower() for name in ALERTS]
    for section in page.split("\n## ")[1:]:
        assert re.findall(r"^\*\*(\w+)\*\*", section, re.MULTILINE) == ["Means", "Look", "Do"], section[:40]


def _unit_test(alert: str, series: dict[str, str], at: str, *, fires: bool) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > 0'
    return {
        "interval": "1m",
        "name": f"{alert} {'fires' if fires else 'is silent'}",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": at, "exp_samples": [{"labels": "{}", "value": 1}] if fires else []}
        ],
    }


def _rule(alert: str) -> str:
    """The rules with this alert alone: promtool evaluates all rules of a file at each minute of each case."""
    head, *alerts = re.split(r"(?m)^(?= +- alert: )", rules())
    return head + next(text for text in alerts if f"alert: {alert}\n" in text)


def _tried(tmp_path: Path, tests: list[tuple[str, dict[str, object]]]) -> str:
    paths = []
    for number, (alert, test) in enumerate(tests):
        (tmp_path / f"{alert}.rules.yml").write_text(_rule(alert))
        paths.append(tmp_path / f"{number}.json")
        content = {"rule_files": [f"{alert}.rules.yml"], "evaluation_interval": "1m", "tests": [test]}
        paths[-1].write_text(json.dumps(content))
    done = promtool("test", "rules", *paths)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_alert_fires_and_is_silent(tmp_path: Path) -> None:
    """By promtool, over an hour of values of each."""
    tests = []
    for alert, case in CASES.items():
        tests.append((alert, _unit_test(alert, case.firing, case.at, fires=True)))
        tests.append((alert, _unit_test(alert, case.silent, case.at, fires=False)))
    tests += [(alert, _unit_test(alert, series, "1h", fires=True)) for alert, series in MORE.items()]
    assert _tried(tmp_path, tests) == ""


def test_a_case_that_is_wrong_is_found(tmp_path: Path) -> None:
    """Each firing case taken for a silent one, and the other way round."""
    wrong = []
    for alert, case in CASES.items():
        wrong.append((alert, _unit_test(alert, case.firing, case.at, fires=False)))
        wrong.append((alert, _unit_test(alert, case.silent, case.at, fires=True)))
    said = _tried(tmp_path, wrong)
    found = Counter(re.findall(r'expr: "count\(ALERTS\{alertname=."?(\w+)', said.replace("\\", "")))
    assert found == dict.fromkeys(ALERTS, 2), said


def test_without_an_exporter_the_alert_of_exporters_fires(tmp_path: Path) -> None:
    """Whose series are then absent."""
    alert = "OutboxqExporterDown"
    assert _tried(tmp_path, [(alert, _unit_test(alert, {}, "10m", fires=True))]) == ""


@pytest.mark.parametrize("expression", expressions())
def test_rules_and_board_ask_for_series_and_labels_that_there_are(expression: str) -> None:
    """Of the families that are exported, and of labels that these have."""
    found = SERIES.findall(expression)
    assert found, expression
    labels = {"database"}
    for name, selectors in found:
        family = family_of(name)
        labels |= set(family.labels)
        for label in re.findall(r"(\w+)(?:=~|=|!=)", selectors):
            assert label in {"database", *family.labels}, (name, label)
    for names in BY.findall(expression):
        assert {name.strip() for name in names.split(",")} <= labels | OF_PROMETHEUS, expression


def test_the_expressions_of_the_board_are_promql(tmp_path: Path) -> None:
    """Each, with Grafana's variables filled in, as a rule."""
    filled = [
        text.replace("$__rate_interval", "5m").replace("$database", ".*").replace("$queue", ".*")
        for text in expressions()
    ]
    rule_list = [{"record": f"board:n{number}", "expr": text} for number, text in enumerate(filled)]
    path = tmp_path / "board.rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rule_list}]}))
    checked = promtool("check", "rules", path)
    assert checked.returncode == 0, checked


def test_the_board_has_its_rows_and_overlaps_nowhere() -> None:
    """Eight rows; each panel has its place, a title and a unit."""
    board = json.loads(call("metrics", "--print", "dashboard").ok().stdout)
    panels = board["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Health", "Flow", "Backlog", "Latency", "Failures", "Effects and inbox", "Relays", "Database",
    ]  # fmt: skip
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_page_has_every_metric_with_its_labels() -> None:
    """docs/metrics.md, and no other."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(outboxq_\w+)` \|(?: (counter|gauge|histogram) \|)?([^|]*)\|", page, re.MULTILINE)
    found = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows}
    assert found == {family.name: family.labels for family in FAMILIES.values()}
    types = {name: kind for name, kind, _ in rows if kind}
    assert {name: FAMILIES[name].type for name in types} == types
