"""The claims ledger: data/claims.yaml -> verdicts computed from records -> tables.

A verdict is never typed. Each row's rules name a metric of a record, the row's unless they name their own, an aggregate
over seeds, a relation and a bound; the verdict follows. A ledger that does not fit its records is an error
(LedgerError), not a verdict.
"""

import importlib
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from depthlab.checks import holds
from depthlab.ledger import Ledger, LedgerError, Row, Rule, read_ledger
from depthlab.runs.experiment import Experiment
from depthlab.runs.record import Record, RecordError, load
from depthlab.runs.worker import write_atomic

VERDICTS = ("reproduced", "reproduced at small scale", "partly", "not reproduced", "not run here", "not yet")
MIN_SEEDS = 3  # for every scope but theorem
_AGGREGATES = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
    "std": statistics.stdev,
}


@dataclass(frozen=True)
class Outcome:
    """A rule applied to a record: the aggregate, the smallest and largest seed, and whether the rule holds."""

    rule: Rule
    value: float
    low: float
    high: float
    holds: bool

    def __str__(self) -> str:
        bound = self.rule.bound
        limit = f"[{bound[0]:g}, {bound[1]:g}]" if isinstance(bound, tuple) else f"{bound:g}"
        judged = f"{'holds' if self.holds else 'fails'} {self.rule.relation} {limit}"
        judged += " (control)" if self.rule.control else ""
        if math.isnan(self.value):
            return f"{self.rule.says}: not finite (a run diverged), {judged}"
        shown = [f"{self.value:.{digits}g}" for digits in (3, 5, 8, 17)]  # enough of them to agree with the verdict
        value = next((v for v in shown if self._would_hold(float(v)) == self.holds), shown[-1])
        low, high = f"{self.low:.3g}", f"{self.high:.3g}"
        return f"{self.rule.says}: {value}{f' [{low}, {high}]' if low != high else ''}, {judged}"

    def _would_hold(self, value: float) -> bool:
        return holds(self.rule.says, value, self.rule.relation, self.rule.bound)


@dataclass(frozen=True)
class Verdict:
    """One of VERDICTS, with what it follows from. `str(verdict)` is its text."""

    id: str
    verdict: str
    outcomes: tuple[Outcome, ...] = ()

    @property
    def counted(self) -> str:
        """The verdict; where some of the claim's own rules hold, also how many: "partly (2 of 11)"."""
        own = [o for o in self.outcomes if not o.rule.control]
        return f"partly ({sum(o.holds for o in own)} of {len(own)})" if self.verdict == "partly" else self.verdict

    def __str__(self) -> str:
        return self.verdict


def rows() -> tuple[Row, ...]:
    """All claims, in the ledger's order."""
    return read_ledger().rows


def row(claim_id: str) -> Row:
    """The claim `claim_id`, for example row("GC-2").paper_value. LedgerError when there is none."""
    return _find(read_ledger(), claim_id)


def verdict(claim_id: str) -> Verdict:
    """The verdict on one claim. LedgerError when a record of it is missing, stale or does not fit the rules."""
    book = read_ledger()
    return _verdict(book, _find(book, claim_id), {})


def verdicts() -> dict[str, Verdict]:
    """The verdicts on all claims by id, in the ledger's order. Raises like `verdict`."""
    book, seen = read_ledger(), {}
    return {r.id: _verdict(book, r, seen) for r in book.rows}


def report(*claim_ids: str) -> str:
    """Plain lines for notebooks: each claim's id, verdict and scale, the paper's value, and what each rule saw."""
    book, seen, lines = read_ledger(), {}, []
    for claim in (_find(book, i) for i in claim_ids):
        found = _verdict(book, claim, seen)
        lines.append(f"{claim.id}: {found}" + (f" ({claim.scale})" if claim.scale else ""))
        lines.append(f"  paper  {claim.paper_value}")
        lines += [f"  saw    {outcome}" for outcome in found.outcomes]
    return "\n".join(lines)


def experiment(record_id: str) -> Experiment:
    """The Experiment behind a record that the ledger lists. LedgerError when it is unlisted or cannot be built."""
    return _experiment(read_ledger(), record_id)


def judge(claim: Row, *records: Record | None) -> Verdict:
    """The verdict on `claim` from the records its rules read (None for a row without one); staleness is not looked at.

    Raises LedgerError when a rule's record is not among them, does not list the claim, lacks a metric, or has fewer
    than 3 seeds where the scope is not theorem.
    """
    if claim.not_run is not None:
        return Verdict(claim.id, "not run here")
    given = {record.id: record for record in records if record is not None}
    if not claim.rules or not given:
        return Verdict(claim.id, "not yet")
    for record_id in claim.records:
        _need_fit(claim, record_id, given.get(record_id))
    outcomes = tuple(_apply(claim, rule, given[claim.record_of(rule)]) for rule in claim.rules)
    if all(o.holds for o in outcomes):
        return Verdict(claim.id, "reproduced at small scale" if claim.scope == "small" else "reproduced", outcomes)
    some = any(o.holds for o in outcomes if not o.rule.control)
    return Verdict(claim.id, "partly" if some else "not reproduced", outcomes)


def current_record(record_id: str, book: Ledger | None = None, folder: Traversable | None = None) -> Record:
    """The record `record_id`; LedgerError when it is missing, invalid, or made with another config (stale)."""
    source = _experiment(book or read_ledger(), record_id)
    try:
        record = load(record_id, folder)
    except RecordError as error:
        raise LedgerError(str(error)) from None
    if record.config_hash != source.config_hash:
        raise LedgerError(
            f"Record {record_id} is stale: its experiment's config changed; run `{record.command}` again."
        )
    return record


def table(paper: str, notebooks: Path | None = None) -> str:
    """One paper's claims in markdown: a table of verdicts, and folded below it what each rule saw.

    Rows link to their notebook where `notebooks`, a folder, holds it.
    """
    book, seen = read_ledger(), {}
    if paper not in book.papers:
        raise LedgerError(f"There is no paper '{paper}'; the papers are {', '.join(book.papers)}.")
    lines = ["| id | claim | paper's value | verdict | notebook |", "|---|---|---|---|---|"]
    details = ["<details><summary>What we saw, rule by rule</summary>", ""]
    for claim in (r for r in book.rows if r.paper == paper):
        found = _verdict(book, claim, seen)
        link = ""
        if notebooks is not None and (notebooks / f"{claim.notebook}.ipynb").is_file():
            link = f"[{claim.notebook.split('_')[0]}]({notebooks.name}/{claim.notebook}.ipynb)"
        cells = [claim.id, _cell(claim.statement), _cell(claim.paper_value), f"**{found.counted}**", link]
        lines.append(f"| {' | '.join(cells)} |")
        details += _details(claim, found)
    if len(details) > 2:
        lines += ["", *details, "", "</details>"]
    return "\n".join(lines)


def _details(claim: Row, found: Verdict) -> list[str]:
    if claim.not_run:
        return [f"- **{claim.id}**, {found}: `{claim.not_run['command']}` ({claim.not_run['cost']})"]
    if not found.outcomes:
        return []
    records = f"Record{'s' * (len(claim.records) > 1)} {', '.join(f'`{r}`' for r in claim.records)}"
    title = f"- **{claim.id}**, {found.counted}. {_cell(claim.scale)}. {records}."
    return [title, *(f"  - {_cell(str(outcome))}" for outcome in found.outcomes)]


def records_table() -> str:
    """The markdown table of the records the ledger's verdicts come from, with the command that makes each again."""
    book = read_ledger()
    lines = ["| record | made again by | cost | made on | at commit |", "|---|---|---|---|---|"]
    for record_id in sorted({record_id for r in book.rows for record_id in r.records}):
        record = current_record(record_id, book)
        machine = ", ".join(record.hardware.get("gpus", [])[:1]) or record.hardware["cpu"]
        commit = record.commit[:10] + ("" if record.clean else " with local changes")
        made = f"{record.date[:10]}, {machine}, torch {record.versions['torch']}"
        cells = [record_id, f"`{record.command}`", book.records[record_id].cost, made, commit]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def summary() -> str:
    """One line: how many claims have which verdict."""
    counts = Counter(v.verdict for v in verdicts().values())
    return f"{counts.total()} claims: " + ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) + "."


def readme_text(path: Path | str) -> str:
    """The text of `path` with what stands between the markers generated anew.

    "generated: claims" holds a table a paper and the records; "generated: summary", where present, what was judged so
    far. LedgerError when the claim markers are missing or any marker is not there exactly once.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"{path} cannot be read ({error}); give the README with the claim markers.") from None
    text = _fill(text, path, "claims", claims_section(path.resolve().parent / "notebooks"))
    return _fill(text, path, "summary", summary_section()) if _marker("generated", "summary") in text else text


def write_readme(path: Path | str) -> bool:
    """Generate the claim tables in `path` anew; True if that changed the file."""
    path, new = Path(path), readme_text(path)
    if new == path.read_text(encoding="utf-8"):
        return False
    write_atomic(path, new)
    return True


def claims_section(notebooks: Path) -> str:
    """A heading and a table a paper, then the records behind them."""
    parts = [
        'Under "What we saw", the number is the one its rule judges (a mean, or the worst seed) and brackets hold the '
        "smallest and largest seed; all are computed from the records below.",
    ]
    for name, paper in read_ledger().papers.items():
        parts.append(f"### {paper['title']} ([{paper['arxiv']}](https://arxiv.org/abs/{paper['arxiv']}))")
        parts.append(table(name, notebooks))
    return "\n\n".join([*parts, "### Records", records_table()])


def summary_section() -> str:
    """The counts, then every judged claim with its verdict, the welcome ones first."""
    found = {r: v for r, v in zip(rows(), verdicts().values(), strict=True) if v.outcomes}
    judged = sorted(found, key=lambda r: VERDICTS.index(found[r].verdict))
    return "\n".join([summary(), "", *(f"- **{found[r].counted}** ({r.id}): {r.statement}" for r in judged)]).rstrip()


def _marker(kind: str, name: str) -> str:
    return f"<!-- {kind}: {name} -->"


def _fill(text: str, path: Path, name: str, content: str) -> str:
    start, end = _marker("generated", name), _marker("end", name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise LedgerError(f"{path} needs the lines {start} and {end} once each, in this order.")
    return text[: text.index(start) + len(start)] + "\n" + content + "\n" + text[text.index(end) :]


def _verdict(book: Ledger, claim: Row, seen: dict[str, Record]) -> Verdict:
    for record_id in claim.records:
        if record_id not in seen:
            seen[record_id] = current_record(record_id, book)
    return judge(claim, *(seen[record_id] for record_id in claim.records))


def _need_fit(claim: Row, record_id: str, record: Record | None) -> None:
    if record is None:
        raise LedgerError(f"Row {claim.id} has a rule on record {record_id}, which is not among the records given.")
    if claim.id not in record.claims:
        raise LedgerError(
            f"Row {claim.id} uses record {record.id}, which does not list it among its claims; add it there."
        )
    if claim.scope != "theorem" and len(record.seeds) < MIN_SEEDS:
        raise LedgerError(
            f"Row {claim.id} has the scope {claim.scope} but record {record.id} has {len(record.seeds)} seed(s); a "
            f"trained comparison needs at least {MIN_SEEDS}."
        )


def _apply(claim: Row, rule: Rule, record: Record) -> Outcome:
    try:
        values = record.values(rule.metric)
        if rule.minus is not None:
            values = [a - b for a, b in zip(values, record.values(rule.minus), strict=True)]
    except RecordError as error:
        raise LedgerError(f"Row {claim.id}: {error}") from None
    if rule.aggregate == "std" and len(values) < 2:
        raise LedgerError(f"Row {claim.id} asks for the std of one seed of {rule.metric}; it needs two.")
    if not all(map(math.isfinite, values)):  # min and max would pass over a NaN
        return Outcome(rule, math.nan, math.nan, math.nan, False)
    value = _AGGREGATES[rule.aggregate](values)
    return Outcome(rule, value, min(values), max(values), holds(rule.says, value, rule.relation, rule.bound))


def _experiment(book: Ledger, record_id: str) -> Experiment:
    if record_id not in book.records:
        known = ", ".join(sorted(book.records)) or "none yet"
        raise LedgerError(f"The ledger lists no record '{record_id}'; it lists: {known}.")
    target = book.records[record_id].experiment
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise LedgerError(
            f"Record {record_id} names the experiment {target}, which cannot be loaded: {error}."
        ) from None
    if not isinstance(found, Experiment) or found.id != record_id:
        raise LedgerError(f"Record {record_id} names {target}, which does not return the Experiment '{record_id}'.")
    return found


def _find(book: Ledger, claim_id: str) -> Row:
    for claim in book.rows:
        if claim.id == str(claim_id).upper():
            return claim
    raise LedgerError(f"There is no claim {claim_id!r}; ids run {book.rows[0].id} to {book.rows[-1].id}.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
