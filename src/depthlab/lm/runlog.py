"""The two text files of a training run: run.json says what it is, log.jsonl how it went, one line a logged step."""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from depthlab.data.files import gist
from depthlab.runs import write_atomic

RUN, LOG = "run.json", "log.jsonl"


class TrainingError(RuntimeError):
    """A training run that cannot start or go on; the message says why, what is kept and what to do."""


def changed(out_dir: str | Path, name: str, before: Any, now: Any) -> TrainingError:
    """What to raise where a run is resumed with another setting."""
    return TrainingError(
        f"The run in {out_dir} has {name}={before!r}, and now it is {now!r}; go on with the same settings, or begin in "
        "another folder."
    )


def write_run(out_dir: Path, content: dict[str, Any]) -> None:
    """Write run.json whole. OSError where it cannot be."""
    write_atomic(out_dir / RUN, json.dumps(content, indent=1) + "\n")


def read_run(out_dir: str | Path) -> dict[str, Any]:
    """The content of run.json. TrainingError where the folder holds no run or the file is damaged."""
    path = Path(out_dir) / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        settings = content["settings"]
        whole = isinstance(settings["model"]["config"], dict) and isinstance(settings["model"]["kind"], str)
        whole = whole and isinstance(settings["about"], dict) and isinstance(settings["training"]["steps"], int)
        if not (whole and isinstance(content["parameters"], int)):
            raise ValueError("settings or parameters are missing")
        return content
    except FileNotFoundError:
        raise TrainingError(
            f"{out_dir} holds no training run ({RUN} is missing); give a folder that `depthlab train --out` made."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is damaged ({gist(error)}); start the run again in another folder.") from None
    except (KeyError, TypeError):
        raise TrainingError(f"{path} lacks settings of a run; start the run again in another folder.") from None


def read_log(out_dir: str | Path) -> list[dict[str, Any]]:
    """The whole lines of log.jsonl in order; a last line that a kill cut short is left out. Empty without a log.

    Raises TrainingError for a line that is none of ours: every one is an object of numbers by name, with its step.
    """
    path = Path(out_dir) / LOG
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is torn
    except FileNotFoundError:
        return []
    try:
        found = [json.loads(line) for line in lines]
        if all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in found):
            return found
    except (ValueError, RecursionError):
        pass
    raise TrainingError(f"{path} is damaged; remove the lines that are no JSON objects with a step.")


def first_difference(before: dict[str, Any], now: dict[str, Any], where: str = "") -> tuple[str, Any, Any] | None:
    """The dotted name of the first field in which two trees of settings differ, and both values; None if equal."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if found := first_difference(old, new, f"{where}{name}."):
                return found
        elif old != new:
            return f"{where}{name}", old, new
    return None


class Log:
    """log.jsonl, open for appending, holding only the lines up to `step`: what a resumed run will not write again."""

    def __init__(self, out_dir: Path, step: int) -> None:
        """Raises TrainingError where the log is damaged, OSError where it cannot be written."""
        self.path = out_dir / LOG
        kept = [line for line in read_log(out_dir) if line["step"] <= step] if step else []
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; it survives a kill of this process, and after `sync` also a loss of power."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring all lines to the disk."""
        os.fsync(self._file.fileno())


def table(folders: list[str | Path]) -> list[list[str]]:
    """One row a run, below a row of names: what was trained, how far it is, loss, validation loss, tokens/s.

    Losses are in nats; tokens/s is the median over the logged steps. Raises TrainingError as `read_run`.
    """
    rows = [["run", "model", "scheme", "parameters", "step", "loss", "val loss", "tokens/s"]]
    for folder in map(Path, folders):
        run, log = read_run(folder), read_log(folder)
        model, steps = run["settings"]["model"], run["settings"]["training"]["steps"]
        speeds = sorted(line["tokens_per_s"] for line in log if "tokens_per_s" in line)
        rows.append(
            [
                str(folder),
                model["kind"],
                str(model["config"].get("residual", model["config"].get("variant", "-"))),
                f"{run['parameters']:,}",
                f"{log[-1]['step'] if log else 0}/{steps}",
                _last(log, "loss"),
                _last(log, "val_loss"),
                f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-",
            ]
        )
    return rows


def _last(log: list[dict[str, Any]], name: str) -> str:
    values = [line[name] for line in log if name in line]
    return f"{values[-1]:.4f}" if values and math.isfinite(values[-1]) else "-"
