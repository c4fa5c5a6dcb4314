"""A malformed ledger is one sentence that names the place."""

import pytest

from depthlab.ledger import LedgerError, read_ledger

HEAD = """
papers: {gc: {title: T, arxiv: "2605.04971"}}
records: {a-run: {experiment: "depthlab.pretended:a_run", cost: 1 s}}
claims:
- {id: GC-1, paper: gc, statement: s, paper_value: v, notebook: 10_x, scale: toy, scope: small, record: a-run,
   rules: [{metric: relu.v1, aggregate: mean, relation: ">", bound: 0.5, says: v1}]}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("scope: small", "scope: small, verdict: reproduced", "unknown field 'verdict'"),
        ("says: v1", "says: v1, weight: 2", "unknown field 'weight'"),
        ("says: v1", "says: v1, record: b-run", "GC-1 uses record 'b-run', which section records does not list"),
        ("says: v1", "says: v1, record: 7", "one line of text"),
        ("says: v1", "says: v1, control: maybe", "give true"),
        ("says: v1", "says: v1, control: true", "only controls"),
        ("cost: 1 s", "cost: 1 s, gpu: yes", "unknown field 'gpu'"),
        ("notebook: 10_x, ", "", "lacks the field 'notebook'"),
        ("cost: 1 s", "", "Record a-run"),
        ("scope: small", "scope: huge", "scope 'huge'"),
        ("paper: gc", "paper: abc", "paper 'abc'"),
        ("id: GC-1", "id: GC-1a", "unusable id"),
        ("id: GC-1", "id: ĠC-1", "unusable id"),
        ("id: GC-1", "id: 7", "one line of text"),
        ("notebook: 10_x", "notebook: ../10_x", "notebook '../10_x'"),
        ("scale: toy", "scale: ''", "empty scale"),
        ("statement: s", "statement: ' '", "one line of text"),
        ("paper_value: v", "paper_value: 0.22", "in quotes"),
        ("record: a-run,", "record: other,", "does not list"),
        ("record: a-run,", "", "no record to apply"),
        ("aggregate: mean", "aggregate: average", "aggregate 'average'"),
        ('relation: ">"', 'relation: "=>"', "relation '=>'"),
        ('relation: ">"', "relation: in", r"\(low, high\)"),
        ("bound: 0.5", "bound: 1e-3", "1.0e-3"),
        ("bound: 0.5", "bound: .nan", "finite"),
        ("bound: 0.5", "bound: true", "finite"),
        ("bound: 0.5", "bound: [2, 1]", "real number"),
        ('relation: ">", bound: 0.5', 'relation: in, bound: [2, 1]', "low <= high"),
        ("bound: 0.5", "bound: 0.5, bound: 0.6", "appears twice"),
        ("experiment: \"depthlab.pretended:a_run\"", "experiment: os:getcwd", "give depthlab"),
        ("experiment: \"depthlab.pretended:a_run\"", "experiment: depthlab.x:__doc__", "give depthlab"),
        ("a-run: {", "../a: {", "unusable"),
        ("arxiv:", "url:", "unknown field 'url'"),
        ("claims:\n", "claim:\n", "exactly the sections"),
        ("scope: small", "scope: small, not_run: {command: c, cost: x}", "both rules and not_run"),
        ("rules: [", "rules: x, extra: [", "unknown field 'extra'"),
        ("- {id", "- {{id", "not valid YAML"),
        ("claims:", "claims: !!python/object/apply:os.getcwd []\nx:", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_malformed_ledger_is_one_sentence_that_names_the_place(old: str, new: str, says: str) -> None:
    assert read_ledger(HEAD)
    assert old in HEAD
    with pytest.raises(LedgerError, match=says) as caught:
        read_ledger(HEAD.replace(old, new, 1))
    assert "\n" not in str(caught.value)


def test_a_row_given_twice_is_an_error() -> None:
    again = HEAD[HEAD.index("- {id") :]
    with pytest.raises(LedgerError, match="GC-1 appears twice"):
        read_ledger(HEAD + again)


def test_a_rules_record_is_the_rows_unless_it_names_its_own() -> None:
    claim = read_ledger(HEAD).rows[0]
    assert (claim.records, claim.rules[0].record) == (("a-run",), None)
    listed = HEAD.replace("cost: 1 s}}", 'cost: 1 s}, b-run: {experiment: "depthlab.pretended:b_run", cost: 2 s}}')
    claim = read_ledger(listed.replace("says: v1", "says: v1, record: b-run")).rows[0]
    assert (claim.record, claim.records, claim.record_of(claim.rules[0])) == ("a-run", ("b-run",), "b-run")
