"""data/claims.yaml, parsed and validated: what the papers claim and which rule judges each claim."""

import re
from collections import Counter
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from typing import Any

import yaml

from depthlab.checks import holds
from depthlab.runs.record import CLAIM_ID, RECORD_ID, number_fault

SCOPES = ("theorem", "small", "paper")
AGGREGATES = ("mean", "min", "max", "median", "std")


class LedgerError(ValueError):
    """The ledger is malformed, or does not fit its records; one sentence that names the row."""


@dataclass(frozen=True)
class Rule:
    """`aggregate` over seeds of `metric` (less `minus`, seed by seed) must stand in `relation` to `bound`.

    A `control` is a condition of the experiment (the network learns), not a part of the claim: it cannot earn a
    verdict, and where it fails the claim is at most partly reproduced. `record` is where the numbers are from, the
    row's record unless given.
    """

    metric: str
    aggregate: str
    relation: str
    bound: float | tuple[float, float]
    says: str
    minus: str | None = None
    control: bool = False
    record: str | None = None


@dataclass(frozen=True)
class Row:
    """One claim. `paper_value` is the paper's figure verbatim; `scale` says in words what it was tested at."""

    id: str
    paper: str
    statement: str
    paper_value: str
    notebook: str
    scale: str
    scope: str
    record: str | None = None
    rules: tuple[Rule, ...] = ()
    not_run: dict[str, str] | None = None

    @property
    def records(self) -> tuple[str, ...]:
        """Ids of the records that the rules read, each once, in the rules' order."""
        return tuple(dict.fromkeys(self.record_of(rule) for rule in self.rules))

    def record_of(self, rule: Rule) -> str:
        """Id of the record that `rule`, one of this row's, reads."""
        return rule.record or self.record


@dataclass(frozen=True)
class Source:
    """Where a record comes from: "module:function" returning its Experiment, and the cost of making it."""

    experiment: str
    cost: str


@dataclass(frozen=True)
class Ledger:
    """The parsed claims.yaml. papers: short name -> {title, arxiv}; records: record id -> Source."""

    papers: dict[str, dict[str, str]]
    records: dict[str, Source]
    rows: tuple[Row, ...]


def read_ledger(text: str | None = None) -> Ledger:
    """Parse and validate a ledger, the bundled one unless `text` is given. LedgerError names the row and the field."""
    if text is None:
        text = (files("depthlab.bundles") / "claims.yaml").read_text(encoding="utf-8")
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LedgerError(f"claims.yaml is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(data, dict) or set(data) != {"papers", "records", "claims"}:
        raise LedgerError("claims.yaml needs exactly the sections papers, records and claims.")
    if not isinstance(data["claims"], list) or not data["claims"]:
        raise LedgerError("Section claims of claims.yaml must be a list of rows.")
    papers, records = data["papers"] or {}, data["records"] or {}
    for name, section in (("papers", papers), ("records", records)):
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            raise LedgerError(f"Section {name} of claims.yaml must map names to entries.")
    for name, paper in papers.items():
        _need_fields(f"Paper {name}", paper, {"title", "arxiv"})
    book = Ledger(papers, {k: _source(k, v) for k, v in records.items()}, tuple(map(_row, data["claims"])))
    for claim in book.rows:
        if claim.paper not in papers:
            raise LedgerError(f"Row {claim.id} has the paper '{claim.paper}'; the papers are {', '.join(papers)}.")
        used = [claim.record] if claim.record is not None else []
        for record_id in [*used, *claim.records]:
            if record_id not in book.records:
                raise LedgerError(f"Row {claim.id} uses record '{record_id}', which section records does not list.")
    twice = [claim for claim, count in Counter(claim.id for claim in book.rows).items() if count > 1]
    if twice:
        raise LedgerError(f"Row {twice[0]} appears twice in claims.yaml; keep one.")
    return book


def _row(data: Any) -> Row:
    where = f"Row {data.get('id', '?')}" if isinstance(data, dict) else "A row"
    required = {f.name for f in fields(Row) if f.default is MISSING}
    _need_fields(where, data, required, {"record", "rules", "not_run"}, texts=required | {"record"}, empty={"scale"})
    if not CLAIM_ID.fullmatch(data["id"]):
        raise LedgerError(f"{where} has an unusable id; give one like GC-1, MGR-2 or FLT-3.")
    if data["scope"] not in SCOPES:
        raise LedgerError(f"{where} has the scope '{data['scope']}'; use {', '.join(SCOPES)}.")
    if not re.fullmatch(r"[0-9]{2}_[a-z0-9_]+", data["notebook"]):
        raise LedgerError(f"{where} has the notebook '{data['notebook']}'; give a name like 01_norm_bound.")
    rules = data.get("rules", [])
    if not isinstance(rules, list):
        raise LedgerError(f"{where} has rules that are no list.")
    if rules and "record" not in data:
        raise LedgerError(f"{where} has rules but no record to apply them to.")
    if rules and not data["scale"]:
        raise LedgerError(f"{where} has rules but an empty scale; say what it was tested at.")
    parsed = tuple(_rule(where, rule) for rule in rules)
    if parsed and all(rule.control for rule in parsed):
        raise LedgerError(f"{where} has only controls among its rules; add one that judges the claim.")
    if "not_run" in data:
        _need_fields(f"{where}, not_run", data["not_run"], {"command", "cost"})
        if rules:
            raise LedgerError(f"{where} has both rules and not_run; keep one.")
    return Row(**{**data, "rules": parsed})


def _rule(where: str, data: Any) -> Rule:
    texts = {"metric", "aggregate", "relation", "says"}
    optional = {"minus", "control", "record"}
    _need_fields(f"A rule of {where}", data, texts | {"bound"}, optional, texts=texts | {"minus", "record"})
    if not isinstance(data.get("control", False), bool):
        raise LedgerError(f"{where} has control: {data['control']!r}; give true, or leave it out.")
    if data["aggregate"] not in AGGREGATES:
        raise LedgerError(f"{where} has the aggregate '{data['aggregate']}'; use {', '.join(AGGREGATES)}.")
    bound = data["bound"]
    for number in bound if isinstance(bound, list) else [bound]:
        if number_fault(number):
            raise LedgerError(f"{where} has the bound {number!r}; give finite numbers (YAML wants 1.0e-3, not 1e-3).")
    bound = tuple(map(float, bound)) if isinstance(bound, list) else float(bound)
    try:
        holds(data["says"], 0.0, data["relation"], bound)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"{where}: {error}") from None
    return Rule(**{**data, "bound": bound})


def _source(record_id: str, data: Any) -> Source:
    _need_fields(f"Record {record_id}", data, {"experiment", "cost"})
    if not RECORD_ID.fullmatch(record_id):
        raise LedgerError(f"Record id {record_id!r} is unusable; give lower-case letters, digits and '-'.")
    if not re.fullmatch(r"depthlab(\.\w+)+:[a-z]\w*", data["experiment"]):
        raise LedgerError(
            f"Record {record_id} has the experiment '{data['experiment']}'; give depthlab.part.module:function."
        )
    return Source(**data)


def _need_fields(
    where: str,
    data: Any,
    required: set[str],
    optional: frozenset[str] | set[str] = frozenset(),
    texts: set[str] | None = None,
    empty: frozenset[str] | set[str] = frozenset(),
) -> None:
    """All of `required`, nothing beyond `optional`; `texts` (all required, unless given) are one-line texts."""
    if not isinstance(data, dict):
        raise LedgerError(f"{where} is {type(data).__name__}, not a block of fields.")
    for name in [n for n in data if n not in required | optional]:
        raise LedgerError(
            f"{where} has the unknown field '{name}'; the fields are {', '.join(sorted(required | optional))}."
        )
    for name in sorted(required - set(data)):
        raise LedgerError(f"{where} lacks the field '{name}'.")
    for name in sorted((required if texts is None else texts) & set(data)):
        value = data[name]
        if not isinstance(value, str) or "\n" in value or (not value.strip() and name not in empty):
            raise LedgerError(
                f"{where} has {name}: {value!r}; give one line of text (in quotes if YAML reads a number)."
            )


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key '{key}' appears twice in line {node.start_mark.line + 1} and after")
        return super().construct_mapping(node, deep)
