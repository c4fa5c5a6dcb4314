"""Verdicts follow from the ledger's rules and the records; a ledger that does not fit is an error, never a verdict."""

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from depthlab import claims
from depthlab.claims import LedgerError, judge
from depthlab.ledger import Row, Rule, read_ledger
from depthlab.runs import Cell, Experiment, Result, grid, load, make
from depthlab.runs.record import Record, config_hash

ROOT = Path(__file__).parents[1]


def rule(metric: str = "relu.v1", aggregate: str = "mean", relation: str = ">", bound: Any = 0.5, **more: Any) -> Rule:
    return Rule(metric, aggregate, relation, bound, says="v1 of ReLU", **more)


def row(*rules: Rule, scope: str = "small", **more: Any) -> Row:
    fields = {
        "paper": "gc",
        "statement": "s",
        "paper_value": "v",
        "notebook": "10_x",
        "scale": "toy",
        "record": "a-run",
    }
    return Row(**{"id": "GC-1", "scope": scope, "rules": rules} | fields | more)


def record(metrics: dict[str, dict[str, list]], seeds: int = 3, claim: str = "GC-1", **more: Any) -> Record:
    fields: dict[str, Any] = {
        "id": "a-run",
        "claims": [claim],
        "command": "c",
        "config": {},
        "config_hash": config_hash({}),
    }
    fields |= {"seeds": list(range(seeds)), "commit": "0" * 40, "clean": True, "hardware": {"cpu": "x"}, "versions": {}}
    return Record(**fields | {"date": "d", "wall_time_s": 1.0, "metrics": metrics} | more)


SEEN = {"relu": {"v1": [0.6, 0.9, 0.75]}, "none": {"v1": [0.5, 0.2, 0.9]}}


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [("mean", 0.75), ("min", 0.6), ("max", 0.9), ("median", 0.75), ("std", 0.15)],
)
def test_each_aggregate_is_taken_over_seeds(aggregate: str, value: float) -> None:
    found = judge(row(rule(aggregate=aggregate, relation="in", bound=(value - 1e-9, value + 1e-9))), record(SEEN))
    assert found.outcomes[0].value == pytest.approx(value)
    assert found.outcomes[0].holds


def test_the_median_of_four_seeds_lies_between_the_middle_two() -> None:
    four = record({"relu": {"v1": [0.2, 0.9, 0.6, 0.4]}}, seeds=4)
    assert judge(row(rule(aggregate="median")), four).outcomes[0].value == pytest.approx(0.5)


def test_a_difference_is_taken_seed_by_seed() -> None:
    paired = rule(aggregate="min", minus="none.v1", relation="<", bound=-0.1)
    # seed by seed: 0.1, 0.7, -0.15; the difference of the two minima would be 0.4
    outcome = judge(row(paired), record(SEEN)).outcomes[0]
    assert outcome.value == pytest.approx(-0.15)
    assert outcome.holds
    assert (outcome.low, outcome.high) == pytest.approx((-0.15, 0.7))


YES, NO = rule(), rule(relation="<")


@pytest.mark.parametrize(
    ("rules", "scope", "verdict"),
    [
        ((YES, YES), "small", "reproduced at small scale"),
        ((YES,), "paper", "reproduced"),
        ((YES,), "theorem", "reproduced"),
        ((YES, NO), "small", "partly"),
        ((NO, NO), "small", "not reproduced"),
        ((), "small", "not yet"),
    ],
)
def test_the_verdict_follows_from_how_many_rules_hold(rules: tuple[Rule, ...], scope: str, verdict: str) -> None:
    assert str(judge(row(*rules, scope=scope), record(SEEN))) == verdict


HELD, FAILED = rule(bound=0.5), rule(bound=0.8)
CONTROL, FAILED_CONTROL = rule(bound=0.5, control=True), rule(bound=0.8, control=True)


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ((HELD, CONTROL), "reproduced at small scale"),
        ((FAILED, CONTROL), "not reproduced"),  # that the network learned makes no refuted claim partly true
        ((HELD, FAILED_CONTROL), "partly"),
        ((HELD, FAILED, CONTROL), "partly"),
        ((FAILED, FAILED_CONTROL), "not reproduced"),
    ],
)
def test_a_control_earns_no_verdict_and_can_spoil_one(rules: tuple[Rule, ...], verdict: str) -> None:
    assert judge(row(*rules), record(SEEN)).verdict == verdict


def test_partly_says_how_many_of_the_claims_own_rules_hold() -> None:
    assert judge(row(HELD, FAILED, FAILED, CONTROL), record(SEEN)).counted == "partly (1 of 3)"
    assert judge(row(HELD, CONTROL), record(SEEN)).counted == "reproduced at small scale"


def test_a_claim_too_large_to_run_says_so() -> None:
    claim = row(record=None, not_run={"command": "depthlab train --preset L", "cost": "8 GPU days"})
    assert str(judge(claim, None)) == "not run here"


@pytest.mark.parametrize("aggregate", ["mean", "min", "max", "median", "std"])
@pytest.mark.parametrize(("relation", "bound"), [("<", 10.0), (">", -10.0), ("in", (-10.0, 10.0)), ("<=", 10.0)])
def test_a_diverged_seed_fails_every_rule(aggregate: str, relation: str, bound: Any) -> None:
    seen = record({"relu": {"v1": [0.1, None, 0.2]}}, diverged={"relu": {"1": "why"}})
    found = judge(row(rule(aggregate=aggregate, relation=relation, bound=bound)), seen)
    assert str(found) == "not reproduced"
    assert math.isnan(found.outcomes[0].value)
    assert "diverged" in str(found.outcomes[0])


def test_a_diverged_seed_of_the_other_side_fails_too() -> None:
    seen = record({**SEEN, "none": {"v1": [0.1, None, 0.2]}}, diverged={"none": {"1": "why"}})
    assert not judge(row(rule(minus="none.v1")), seen).outcomes[0].holds


def test_fewer_than_three_seeds_judge_only_theorems() -> None:
    two = record({"relu": {"v1": [0.6, 0.9]}}, seeds=2)
    for scope in ("small", "paper"):
        with pytest.raises(LedgerError, match=r"GC-1 .*2 seed.*at least 3"):
            judge(row(YES, scope=scope), two)
    assert str(judge(row(YES, scope="theorem"), two)) == "reproduced"
    with pytest.raises(LedgerError, match="std of one seed"):
        judge(row(rule(aggregate="std"), scope="theorem"), record({"relu": {"v1": [0.6]}}, seeds=1))


@pytest.mark.parametrize("path", ["relu.v2", "tanh.v1", "v1"])
def test_a_metric_the_record_lacks_is_an_error(path: str) -> None:
    with pytest.raises(LedgerError, match="Row GC-1: Record a-run has no"):
        judge(row(rule(metric=path)), record(SEEN))
    with pytest.raises(LedgerError, match="Row GC-1: Record a-run has no"):
        judge(row(rule(minus=path)), record(SEEN))


def test_a_record_that_does_not_list_the_claim_is_an_error() -> None:
    with pytest.raises(LedgerError, match="does not list it among its claims"):
        judge(row(YES), record(SEEN, claim="GC-2"))


ELSEWHERE = rule("relu.v2", bound=0.1, record="b-run")  # of a metric that a-run lacks
OTHER = record({"relu": {"v2": [0.2, 0.4, 0.3]}}, id="b-run")


def test_a_rule_can_read_a_record_of_its_own() -> None:
    claim = row(YES, ELSEWHERE)
    assert claim.records == ("a-run", "b-run")
    for given in ((record(SEEN), OTHER), (OTHER, record(SEEN)), (record(SEEN), None, OTHER)):
        found = judge(claim, *given)
        assert [o.value for o in found.outcomes] == pytest.approx([0.75, 0.3])
        assert str(found) == "reproduced at small scale"
    assert str(judge(row(YES, rule("relu.v2", bound=0.5, record="b-run")), record(SEEN), OTHER)) == "partly"
    assert str(judge(row(ELSEWHERE), OTHER)) == "reproduced at small scale"  # no rule reads the row's own record


def test_a_rules_own_record_is_held_to_the_same_conditions() -> None:
    claim, first = row(YES, ELSEWHERE), record(SEEN)
    with pytest.raises(LedgerError, match="GC-1 uses record b-run, which does not list it among its claims"):
        judge(claim, first, record({"relu": {"v2": [0.2, 0.4, 0.3]}}, id="b-run", claim="GC-2"))
    two = record({"relu": {"v2": [0.2, 0.4]}}, id="b-run", seeds=2)
    with pytest.raises(LedgerError, match=r"GC-1 .*record b-run has 2 seed.*at least 3"):
        judge(claim, first, two)
    assert str(judge(row(YES, ELSEWHERE, scope="theorem"), first, two)) == "reproduced"
    with pytest.raises(LedgerError, match="Row GC-1: Record b-run has no metric 'relu.v1'"):
        judge(row(rule(record="b-run")), OTHER)
    with pytest.raises(LedgerError, match="GC-1 has a rule on record b-run, which is not among the records given"):
        judge(claim, first)


def test_what_we_saw_shows_value_range_and_bound() -> None:
    assert str(judge(row(YES), record(SEEN)).outcomes[0]) == "v1 of ReLU: 0.75 [0.6, 0.9], holds > 0.5"
    within = rule(relation="in", bound=(0.0, 0.5))
    assert str(judge(row(within), record(SEEN)).outcomes[0]) == "v1 of ReLU: 0.75 [0.6, 0.9], fails in [0, 0.5]"
    close = record({"relu": {"v1": [0.50001, 0.50001, 0.50001]}})
    assert str(judge(row(YES), close).outcomes[0]) == "v1 of ReLU: 0.50001, holds > 0.5"  # not "0.5, holds > 0.5"
    below = record({"relu": {"v1": [0.4999999, 0.4999999, 0.4999999]}})
    assert str(judge(row(rule(relation=">=")), below).outcomes[0]) == "v1 of ReLU: 0.4999999, fails >= 0.5"
    one = record({"relu": {"v1": [1.0]}}, seeds=1)
    assert str(judge(row(YES, scope="theorem"), one).outcomes[0]) == "v1 of ReLU: 1, holds > 0.5"


# ---- missing and stale records ---------------------------------------------------------------------------------------

HEAD = """
papers: {gc: {title: T, arxiv: "2605.04971"}}
records: {a-run: {experiment: "depthlab.pretended:a_run", cost: 1 s}}
claims:
- {id: GC-1, paper: gc, statement: s, paper_value: v, notebook: 10_x, scale: toy, scope: small, record: a-run,
   rules: [{metric: relu.v1, aggregate: mean, relation: ">", bound: 0.5, says: v1}]}
"""


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("relu", cell.settings["seed"], {"v1": config["v1"]})]


def a_run(v1: float = 0.75, record_id: str = "a-run") -> Experiment:
    return Experiment(record_id, ("GC-1",), {"v1": v1}, grid(seed=[0, 1, 2]), run_cell)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("depthlab.pretended")
    module.a_run = a_run
    monkeypatch.setitem(sys.modules, "depthlab.pretended", module)
    return module


def test_a_record_is_used_while_its_config_is_the_experiments(pretend: types.ModuleType, tmp_path: Path) -> None:
    make(a_run(), tmp_path / "work", tmp_path)
    book = read_ledger(HEAD)
    found = judge(book.rows[0], claims.current_record("a-run", book, tmp_path))
    assert str(found) == "reproduced at small scale"
    pretend.a_run = lambda: a_run(v1=0.5)
    with pytest.raises(LedgerError, match=r"a-run is stale.*depthlab runs make a-run"):
        claims.current_record("a-run", book, tmp_path)


SECOND = """records:
  b-run: {experiment: "depthlab.pretended:b_run", cost: 2 s}
  a-run: {experiment: "depthlab.pretended:a_run", cost: 1 s}
"""
LOW = '{metric: relu.v1, aggregate: mean, relation: "<", bound: 0.5, says: low, record: b-run}'
TWO = re.sub("records:.*\n", SECOND, HEAD, count=1).replace("says: v1}]", "says: v1},\n     " + LOW + "]")


def test_both_records_of_a_row_are_named_and_must_be_current(
    pretend: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend.b_run = lambda: a_run(0.25, "b-run")
    for made in (pretend.a_run(), pretend.b_run()):
        make(made, tmp_path / "work", tmp_path)
    monkeypatch.setattr(claims, "read_ledger", lambda: read_ledger(TWO))
    monkeypatch.setattr(claims, "load", lambda record_id, folder: load(record_id, tmp_path))
    assert str(claims.verdict("GC-1")) == "reproduced at small scale"
    assert "Records `a-run`, `b-run`." in claims.table("gc")
    assert [line.split(" | ")[0] for line in claims.records_table().splitlines()[2:]] == ["| a-run", "| b-run"]
    pretend.b_run = lambda: a_run(0.3, "b-run")
    with pytest.raises(LedgerError, match=r"b-run is stale.*depthlab runs make b-run"):
        claims.verdict("GC-1")


def test_a_bar_in_a_claim_does_not_end_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
papers: {gc: {title: T, arxiv: "2605.04971"}}
records: {}
claims:
- {id: GC-1, paper: gc, statement: "|cos| is high", paper_value: v, notebook: 10_x, scale: "", scope: small}
"""
    monkeypatch.setattr(claims, "read_ledger", lambda: read_ledger(text))
    assert "| \\|cos\\| is high |" in claims.table("gc")


def test_a_missing_or_damaged_record_is_an_error(pretend: types.ModuleType, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no record 'a-run'"):
        claims.current_record("a-run", read_ledger(HEAD), tmp_path)
    (tmp_path / "a-run.json").write_text("{")
    with pytest.raises(LedgerError, match="not valid JSON"):
        claims.current_record("a-run", read_ledger(HEAD), tmp_path)


def test_an_experiment_that_is_not_there_is_an_error(pretend: types.ModuleType, tmp_path: Path) -> None:
    pretend.a_run = lambda: a_run(record_id="b-run")
    with pytest.raises(LedgerError, match="does not return the Experiment 'a-run'"):
        claims.current_record("a-run", read_ledger(HEAD), tmp_path)
    del pretend.a_run
    with pytest.raises(LedgerError, match="cannot be loaded"):
        claims.current_record("a-run", read_ledger(HEAD), tmp_path)
    with pytest.raises(LedgerError, match="lists no record 'c-run'"):
        claims.current_record("c-run", read_ledger(HEAD), tmp_path)


# ---- the committed ledger --------------------------------------------------------------------------------------------


def test_the_ledger_has_every_claim_of_the_three_papers_in_order() -> None:
    counts = {"GC": ("gc", 14), "MGR": ("mgr", 13), "FLT": ("flt", 14)}
    expected = [(f"{name}-{i}", paper) for name, (paper, count) in counts.items() for i in range(1, count + 1)]
    assert [(r.id, r.paper) for r in claims.rows()] == expected


def test_the_papers_figures_are_verbatim() -> None:
    assert claims.row("GC-2").paper_value == "gradient 0.93, weight v1 0.22"
    assert claims.row("FLT-8").paper_value == "+4.82 points, 13.2 % at Base, 6 loops"
    assert claims.row("FLT-11").paper_value == "Base, 9 loops: average 41.72"
    with pytest.raises(LedgerError, match="no claim 'GC-15'; ids run GC-1 to FLT-14"):
        claims.row("GC-15")


def test_the_rate_that_gc4_calls_the_one_of_least_loss_is_that_in_its_record() -> None:
    rates = load("continuity-rates")
    judged = [r.metric.removesuffix(".weight_v1") for r in claims.row("GC-4").rules if "least training loss" in r.says]
    assert len(judged) == 3
    for variant in judged:
        same = [v for v in rates.metrics if v.startswith(variant.split("rate=")[0])]
        loss = {v: sum(rates.values(f"{v}.train_loss")) for v in same}
        assert len(same) == 5
        assert min(loss, key=loss.get) == variant


def test_every_claim_has_a_verdict_and_they_agree_one_by_one() -> None:
    found = claims.verdicts()
    assert list(found) == [r.id for r in claims.rows()]
    assert {v.verdict for v in found.values()} <= set(claims.VERDICTS)
    for claim in claims.rows():
        if claim.rules:
            assert claims.verdict(claim.id) == found[claim.id]
            assert len(found[claim.id].outcomes) == len(claim.rules)
            assert claim.paper_value in claims.report(claim.id)


def test_the_readme_shows_what_the_records_give() -> None:
    readme = ROOT / "README.md"
    assert readme.read_text() == claims.readme_text(readme), "run: depthlab claims --write README.md"


def test_writing_the_tables_touches_only_what_stands_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- generated: claims -->\nformer text\n<!-- end: claims -->\nafter\n", encoding="utf-8")
    assert claims.write_readme(path) is True
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- generated: claims -->\n")
    assert text.endswith("<!-- end: claims -->\nafter\n")
    assert "former text" not in text
    for claim in claims.rows():
        assert len(re.findall(rf"^\| {claim.id} \|", text, re.MULTILINE)) == 1
    assert "](notebooks/" not in text  # no notebook lies beside this file, so nothing links to one
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/01_norm_bound.ipynb").touch()
    assert claims.write_readme(path) is True
    assert "[01](notebooks/01_norm_bound.ipynb)" in path.read_text(encoding="utf-8")
    assert claims.write_readme(path) is False
    tables = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} <= {6, 8}  # every row as wide as its table


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- end: claims --> <!-- generated: claims -->",
        "<!-- generated: claims -->",
        "<!-- generated: claims --><!-- end: claims --><!-- generated: claims --><!-- end: claims -->",
        "<!-- generated: claims --><!-- end: claims --><!-- generated: summary -->",
    ],
)
def test_a_readme_without_a_place_for_the_tables_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(LedgerError, match="once each"):
        claims.write_readme(tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == text
    with pytest.raises(LedgerError, match="cannot be read"):
        claims.write_readme(tmp_path / "missing.md")
