"""The benchmark's records as tables: one row a variant, one row a kernel."""

import re

import numpy as np
import pandas as pd

from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.traffic import OPS, PASSES
from depthlab.runs import Record

_SHAPE = re.compile(r"T=(\d+),n=(\d+),C=(\d+)")


def parse_variant(variant: str) -> tuple[Case, str] | None:
    """The case and implementation of "<case>/<implementation>"; None for other variants ("machine", ...)."""
    *parts, implementation = variant.split("/")
    found = _SHAPE.fullmatch(parts[-1]) if len(parts) in (3, 4) and parts[0] in OPS else None
    if found is None:
        return None
    tokens, n_streams, width = map(int, found.groups())
    gate = parts[1] if len(parts) == 4 else ""
    return Case(parts[0], parts[-2], tokens, n_streams, width, gate), implementation


def rows(record: Record) -> pd.DataFrame:
    """One row a measured variant: op, gate, dtype, tokens, n_streams, width, implementation, and every metric.

    A metric is the median over the record's repetitions; NaN where the row could not be measured (`why` says why). The
    fused kernels' rows also have PASS_over_<other>: the other's time over theirs at the same case, by repetition.
    """
    out = []
    for variant, metrics in record.metrics.items():
        parsed = parse_variant(variant)
        if parsed is None:
            continue
        case, implementation = parsed
        values = {name: float(np.median(record.values(f"{variant}.{name}"))) for name in metrics}
        if implementation == "triton":
            values |= _ratios(record, variant)
        why = "; ".join(dict.fromkeys(record.diverged.get(variant, {}).values()))
        out.append({**vars(case), "implementation": implementation, **values, "why": why})
    return pd.DataFrame(out)


def _ratios(record: Record, fused: str) -> dict[str, float]:
    case = fused.removesuffix("triton")
    found = {}
    for other in record.metrics:
        if other.startswith(case) and other != fused:
            for which in PASSES:
                times = (np.asarray(record.values(f"{variant}.{which}_ms")) for variant in (other, fused))
                found[f"{which}_over_{other.removeprefix(case)}"] = float(np.median(np.divide(*times)))
    return found


def kernels(record: Record, variant: str) -> pd.DataFrame:
    """The kernels of a trace in order: name, start_us, duration_us. RecordError when there is no such trace."""
    _, starts = record.curve(variant, "start_us")
    named = [name for name in record.metrics[variant] if re.match(r"\d{3}/", name)]
    durations = [record.values(f"{variant}.{name}")[0] for name in named]
    return pd.DataFrame({"name": [name[4:] for name in named], "start_us": starts[0], "duration_us": durations})
