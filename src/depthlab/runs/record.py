"""A run record: one JSON file that says what was run, on what, and what came out, seed by seed.

Numbers that are not finite are stored as null, and only for a (variant, seed) that `diverged` explains; read back, they
are NaN, so no comparison with them can hold by accident.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from numbers import Real
from typing import Any

import numpy as np

MAX_CURVE_POINTS = 200
RECORD_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
CLAIM_ID = re.compile(r"(GC|MGR|FLT)-[1-9][0-9]?")
VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,=+*@/()-]{0,99}")
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_,=+@/-]{0,99}")  # no dot: a path's last dot ends the variant
_MACHINE_PATH = re.compile(r"(^|[\s'\"=:])(/(home|root|tmp|work|mnt|Users|var|data)/|~/|[A-Za-z]:\\)")


class RecordError(ValueError):
    """A record is missing, unreadable or breaks the schema; the message has one sentence a fault."""


@dataclass(frozen=True)
class Record:
    """What one experiment gave. `metrics[variant][metric]` holds one number per seed, in the order of `seeds`.

    Attributes:
        config: everything that decides the numbers, the grid of cells included; `config_hash` is its sha256.
        commit: the git commit (40 hex digits), or "unknown". clean: no source file differed from it.
        wall_time_s: seconds spent inside cells, added up over cells and restarts.
        curves: curves[variant][name] = {"x": [points], "y": [seeds][points]}, at most 200 points.
        diverged: diverged[variant][seed as text] = one sentence, for runs whose numbers are not all finite.
    """

    id: str
    claims: list[str]
    command: str
    config: dict[str, Any]
    config_hash: str
    seeds: list[int]
    commit: str
    clean: bool
    hardware: dict[str, Any]
    versions: dict[str, str]
    date: str
    wall_time_s: float
    metrics: dict[str, dict[str, list[float | None]]]
    curves: dict[str, dict[str, dict[str, list]]] = field(default_factory=dict)
    diverged: dict[str, dict[str, str]] = field(default_factory=dict)

    def values(self, path: str) -> list[float]:
        """The numbers of "variant.metric", one per seed; NaN where a run diverged. RecordError names what exists."""
        variant, dot, metric = path.rpartition(".")
        if not dot or variant not in self.metrics:
            raise RecordError(f"Record {self.id} has no variant for '{path}'; {_choices('variants', self.metrics)}.")
        if metric not in self.metrics[variant]:
            known = _choices(f"metrics of {variant}", self.metrics[variant])
            raise RecordError(f"Record {self.id} has no metric '{path}'; {known}.")
        return [math.nan if v is None else float(v) for v in self.metrics[variant][metric]]

    def curve(self, variant: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(x [points], y [seeds, points]) as float64; NaN where a run diverged. RecordError names what exists."""
        found = self.curves.get(variant, {})
        if name not in found:
            known = sorted(f"{v}.{n}" for v, curves in self.curves.items() for n in curves)
            raise RecordError(f"Record {self.id} has no curve '{variant}.{name}'; {_choices('curves', known)}.")
        return np.asarray(found[name]["x"], dtype=float), np.asarray(found[name]["y"], dtype=float)

    def to_json(self) -> str:
        """The file's text: indented objects, each list of numbers on one line."""
        return _layout(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "The record") -> "Record":
        """Parse and validate; RecordError begins with `source` and gives the first three faults, a sentence each."""
        try:
            data = parse_json(text)
            found = faults(data)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{source} is not valid JSON ({error}); make it again with its command.") from None
        if found:
            more = f" ({len(found) - 3} more faults.)" if len(found) > 3 else ""
            raise RecordError(f"{source} breaks the schema: {' '.join(found[:3])}{more}")
        return cls(**data)


def load(record_id: str, folder: Traversable | None = None) -> Record:
    """The record `record_id`, validated; from the committed ones in data/results unless `folder` is given.

    Raises RecordError when it is unknown, unreadable, breaks the schema or carries another id.
    """
    if not isinstance(record_id, str) or not RECORD_ID.fullmatch(record_id):
        raise RecordError(f"{record_id!r} is no record id; give lower-case letters, digits and '-', at most 64.")
    path = (folder or _results()) / f"{record_id}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(
            f"There is no record '{record_id}' in data/results; {_choices('records', record_ids(folder))}, "
            f"and `depthlab runs make {record_id}` makes one the ledger lists."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"Record {record_id} cannot be read ({error}); make it again.") from None
    record = Record.from_json(text, source=f"data/results/{record_id}.json")
    if record.id != record_id:
        raise RecordError(f"data/results/{record_id}.json carries the id '{record.id}'; rename it or make it again.")
    return record


def record_ids(folder: Traversable | None = None) -> list[str]:
    """Ids of the records in data/results (or `folder`), sorted."""
    folder = folder or _results()
    if not folder.is_dir():
        return []
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


def canonical_json(value: Any) -> str:
    """The one text of a JSON-able value that is hashed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def config_hash(config: dict[str, Any]) -> str:
    """sha256 of the canonical JSON of `config`, 64 hex digits."""
    return hashlib.sha256(canonical_json(config).encode("ascii")).hexdigest()


def parse_json(text: str) -> Any:
    """json.loads that refuses what is not JSON (NaN, Infinity) and repeated keys, which it would drop in silence."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key '{next(k for k in keys if keys.count(k) > 1)}' appears twice")
        return result

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON; write null")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def number_fault(value: Any) -> str | None:
    """What keeps `value` from being one finite float, or None. True and False are not numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return f"is {_short(value)}, not a number"
    try:
        return None if math.isfinite(float(value)) else f"is {float(value)}, not finite"
    except OverflowError:
        return "is too large for a float"


def config_faults(value: Any, where: str = "config") -> list[str]:
    """Why `value` would not come back from JSON as it went in, or names a place on one machine; empty when sound."""
    if isinstance(value, dict):
        bad = [f"{where} has the key {_short(k)}; keys must be text." for k in value if not isinstance(k, str)]
        return bad + [f for k, v in value.items() if isinstance(k, str) for f in config_faults(v, f"{where}.{k}")]
    if isinstance(value, list):
        return [f for i, v in enumerate(value) for f in config_faults(v, f"{where}[{i}]")]
    if isinstance(value, str):
        if _MACHINE_PATH.search(value):
            return [f"{where} is {_short(value)}, which looks like a path on one machine; give a name instead."]
        return []
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63):
        return []
    if isinstance(value, int):
        return [f"{where} is {_short(value)}; whole numbers must fit into 64 bits."]
    if isinstance(value, float):
        return [] if math.isfinite(value) else [f"{where} is {value}, which JSON cannot hold; use null or text."]
    return [f"{where} is a {type(value).__name__}; use text, numbers, true, false, null, lists and dicts of these."]


def faults(data: Any) -> list[str]:
    """Every way in which `data` (parsed JSON) is not a record: one sentence each, naming the field."""
    if not isinstance(data, dict):
        return [f"a record is an object, not {_short(data)}."]
    names = [f.name for f in fields(Record)]
    found = [f"field '{name}' is missing." for name in names if name not in data]
    unknown = [name for name in data if name not in names]
    found += [f"field {_short(name)} is unknown; the fields are {', '.join(names)}." for name in unknown]
    if found:
        return found
    found += _header_faults(data) + config_faults(data["config"]) + config_faults(data["hardware"], "hardware")
    if found:
        return found
    if data["config_hash"] != config_hash(data["config"]):
        found.append("config_hash is not the sha256 of config; the file was edited, so make it again.")
    return found + _metric_faults(data) + _curve_faults(data) + _diverged_faults(data)


def _header_faults(data: dict[str, Any]) -> list[str]:
    def text(value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    def unique_list(value: Any, good: Any) -> bool:
        return isinstance(value, list) and all(good(v) for v in value) and len(set(value)) == len(value)

    def matches(pattern: re.Pattern, value: Any) -> bool:
        return isinstance(value, str) and bool(pattern.fullmatch(value))

    def claim(value: Any) -> bool:
        return matches(CLAIM_ID, value)

    def object_of_objects(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())

    rules = {
        "id": (matches(RECORD_ID, data["id"]), "lower-case letters, digits and '-', at most 64"),
        "claims": (unique_list(data["claims"], claim), "a list of different claim ids like GC-1"),
        "command": (text(data["command"]) and not _MACHINE_PATH.search(data["command"]), "a command without a path"),
        "config": (isinstance(data["config"], dict), "an object"),
        "config_hash": (matches(re.compile("[0-9a-f]{64}"), data["config_hash"]), "64 hex digits"),
        "seeds": (unique_list(data["seeds"], whole) and bool(data["seeds"]), "a list of different whole numbers >= 0"),
        "commit": (matches(re.compile("[0-9a-f]{40}|unknown"), data["commit"]), "40 hex digits or 'unknown'"),
        "clean": (isinstance(data["clean"], bool), "true or false"),
        "hardware": (isinstance(data["hardware"], dict) and text(data["hardware"].get("cpu")), "an object with 'cpu'"),
        "versions": (
            isinstance(data["versions"], dict)
            and all(text(v) for v in data["versions"].values())
            and {"python", "torch", "numpy", "depthlab"} <= set(data["versions"]),
            "an object of texts with python, torch, numpy and depthlab",
        ),
        "date": (_is_utc(data["date"]), "a UTC time like 2026-11-29T20:15:00Z"),
        "wall_time_s": (number_fault(data["wall_time_s"]) is None and data["wall_time_s"] >= 0, "seconds >= 0"),
        "metrics": (
            object_of_objects(data["metrics"]) and data["metrics"] != {},
            "an object variant -> metric -> list",
        ),
        "curves": (object_of_objects(data["curves"]), "an object variant -> name -> {x, y}"),
        "diverged": (object_of_objects(data["diverged"]), "an object variant -> seed -> sentence"),
    }
    return [f"{name} is {_short(data[name])}; give {wanted}." for name, (good, wanted) in rules.items() if not good]


def _metric_faults(data: dict[str, Any]) -> list[str]:
    found = []
    for variant, metrics in data["metrics"].items():
        if not VARIANT_NAME.fullmatch(variant):
            found.append(f"metrics has the variant {_short(variant)}; use ASCII letters, digits and _.,=+*@/()-.")
        if not metrics:
            found.append(f"metrics.{variant} is empty; give at least one metric.")
        for metric, values in metrics.items():
            where = f"metrics.{variant}.{metric}"
            if not METRIC_NAME.fullmatch(metric):
                found.append(f"{where} has a metric name outside ASCII letters, digits and _,=+@/-.")
            if not isinstance(values, list) or len(values) != len(data["seeds"]):
                found.append(f"{where} is {_short(values)}; give one number for each of {len(data['seeds'])} seeds.")
            else:
                found += _value_faults(data, variant, where, values, data["seeds"])
    return found


def _curve_faults(data: dict[str, Any]) -> list[str]:
    found = []
    for variant, curves in data["curves"].items():
        if variant not in data["metrics"]:
            found.append(f"curves.{variant} has no metrics; every variant needs at least one metric.")
        for name, curve in curves.items():
            where = f"curves.{variant}.{name}"
            if not METRIC_NAME.fullmatch(name):
                found.append(f"{where} has a curve name outside ASCII letters, digits and _,=+@/-.")
            whole = isinstance(curve, dict) and set(curve) == {"x", "y"}
            if not whole or not all(isinstance(v, list) for v in curve.values()):
                found.append(f"{where} is {_short(curve)}; give an object with the lists x and y.")
                continue
            x, y = curve["x"], curve["y"]
            if not 1 <= len(x) <= MAX_CURVE_POINTS:
                found.append(f"{where}.x has {len(x)} points; give 1 to {MAX_CURVE_POINTS}.")
            found += [f"{where}.x {fault}." for fault in map(number_fault, x) if fault]
            if len(y) != len(data["seeds"]) or not all(isinstance(row, list) and len(row) == len(x) for row in y):
                found.append(f"{where}.y must be one list a seed ({len(data['seeds'])}), each as long as x ({len(x)}).")
                continue
            for i, row in enumerate(y):
                found += _value_faults(data, variant, f"{where}.y[{i}]", row, [data["seeds"][i]] * len(row))
    return found


def _value_faults(data: dict[str, Any], variant: str, where: str, values: list, seeds: list[int]) -> list[str]:
    excused = data["diverged"].get(variant, {})
    found = []
    for value, seed in zip(values, seeds, strict=True):
        if value is None and str(seed) in excused:
            continue
        fault = number_fault(value)
        if fault:
            found.append(f"{where} {fault} (seed {seed}); only a run listed in 'diverged' may hold null.")
    return found[:3]


def _diverged_faults(data: dict[str, Any]) -> list[str]:
    found = []
    for variant, seeds in data["diverged"].items():
        if variant not in data["metrics"]:
            found.append(f"diverged.{_short(variant)} names a variant without metrics.")
        for seed, why in seeds.items():
            if seed not in map(str, data["seeds"]):
                found.append(f"diverged.{variant} names seed {_short(seed)}, which is not in seeds.")
            if not isinstance(why, str) or not why.strip():
                found.append(f"diverged.{variant}.{seed} is {_short(why)}; say in a sentence what happened.")
    return found


def _results() -> Traversable:
    return files("depthlab.bundles") / "results"


def _is_utc(value: Any) -> bool:
    try:
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # Python does not write out integers of thousands of digits
        return f"a {type(value).__name__} too large to show"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _choices(what: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"the {what} are {', '.join(names)}" if names else f"there are no {what}"


def _layout(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(k)}: {_layout(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, list | dict) for v in value):
        rows = [json.dumps(v, allow_nan=False) for v in value]
        return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
