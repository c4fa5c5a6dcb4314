"""A record file is accepted only when every field is what it says; each fault is one sentence that names the field."""

import copy
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from depthlab.runs import RecordError, load
from depthlab.runs.record import Record, config_hash, faults

HOME = "/" + "home/me"  # in two pieces, since no committed file may name such a folder
CONFIG = {"steps": 100, "rate": 1e-3, "cells": [{"variant": "relu", "seed": 0}]}


def record(**changes: Any) -> dict[str, Any]:
    """A sound record of two variants and three seeds, with the given fields changed."""
    data = {
        "id": "some-run",
        "claims": ["GC-1", "MGR-13"],
        "command": "depthlab runs make some-run",
        "config": CONFIG,
        "config_hash": config_hash(CONFIG),
        "seeds": [0, 1, 2],
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "clean": True,
        "hardware": {"cpu": "Some CPU", "cores": 2, "threads": 1},
        "versions": {"python": "3.11.7", "torch": "2.9.0", "numpy": "2.0.0", "depthlab": "0.1.0"},
        "date": "2026-11-29T20:15:00Z",
        "wall_time_s": 12.5,
        "metrics": {"relu": {"loss": [0.5, 0.25, 0.75]}, "g=0.32": {"loss": [1.0, None, 3.0]}},
        "curves": {"relu": {"loss": {"x": [1.0, 2.0], "y": [[1.0, 0.5], [1.0, 0.25], [1.0, 0.75]]}}},
        "diverged": {"g=0.32": {"1": "loss not finite at step 7"}},
    }
    return copy.deepcopy(data | changes)


def without(name: str) -> dict[str, Any]:
    data = record()
    del data[name]
    return data


def test_a_sound_record_has_no_faults_and_survives_writing_and_reading() -> None:
    assert faults(record()) == []
    made = Record(**record())
    assert Record.from_json(made.to_json()) == made
    assert json.loads(made.to_json()) == record()


def test_values_and_curves_come_seed_by_seed_with_nan_where_a_run_diverged() -> None:
    made = Record(**record())
    assert made.values("relu.loss") == [0.5, 0.25, 0.75]
    values = made.values("g=0.32.loss")  # the variant's own dot does not confuse the path
    assert values[0] == 1.0
    assert math.isnan(values[1])
    x, y = made.curve("relu", "loss")
    assert x.tolist() == [1.0, 2.0]
    assert y.shape == (3, 2)
    assert np.array_equal(y[:, 1], [0.5, 0.25, 0.75])


@pytest.mark.parametrize("path", ["relu.accuracy", "tanh.loss", "loss", "", "relu."])
def test_an_unknown_path_names_what_exists(path: str) -> None:
    with pytest.raises(RecordError, match=r"relu|loss"):
        Record(**record()).values(path)


def test_the_config_hash_is_sha256_of_sorted_compact_json() -> None:
    text = '{"a":[1,2.5,null,true],"b":"\\u00e9"}'
    assert config_hash({"b": "é", "a": [1, 2.5, None, True]}) == hashlib.sha256(text.encode()).hexdigest()


HUGE = 10**5000
FAULTY: dict[str, tuple[dict[str, Any] | Callable, str]] = {
    "missing field": (without("commit"), "commit"),
    "unknown field": (record(host="node7"), "host"),
    "upper-case id": (record(id="Some-Run"), "id"),
    "unicode id": (record(id="läuf"), "id"),
    "id that climbs": (record(id="../../etc"), "id"),
    "claims not ids": (record(claims=["GC1"]), "claims"),
    "claim twice": (record(claims=["GC-1", "GC-1"]), "claims"),
    "claims as text": (record(claims="GC-1"), "claims"),
    "command with a path": (record(command=f"{HOME}/run.sh"), "command"),
    "config not an object": (record(config=[1]), "config"),
    "config edited": (record(config=CONFIG | {"steps": 101}), "config_hash"),
    "path in config": (record(config={"root": f"{HOME}/mnist"}), "config.root"),
    "number key in config": (record(config={1: 2}), "config"),
    "huge number in config": (record(config={"n": 2**64}), "config.n"),
    "nan in config": (record(config={"rate": math.nan}), "config.rate"),
    "no seeds": (record(seeds=[]), "seeds"),
    "seed twice": (record(seeds=[0, 0, 1]), "seeds"),
    "seed true": (record(seeds=[True, 2, 3]), "seeds"),
    "seed negative": (record(seeds=[-1, 0, 1]), "seeds"),
    "seed huge": (record(seeds=[HUGE, 0, 1]), "seeds"),
    "short commit": (record(commit="0123456"), "commit"),
    "clean as text": (record(clean="yes"), "clean"),
    "no cpu": (record(hardware={"cores": 2}), "hardware"),
    "path in hardware": (record(hardware={"cpu": "x", "disk": HOME}), "hardware.disk"),
    "no torch version": (record(versions={"python": "3.11", "numpy": "2", "depthlab": "0"}), "versions"),
    "local date": (record(date="29.11.2026"), "date"),
    "date null": (record(date=None), "date"),
    "time negative": (record(wall_time_s=-1.0), "wall_time_s"),
    "time true": (record(wall_time_s=True), "wall_time_s"),
    "time infinite": (record(wall_time_s=math.inf), "wall_time_s"),
    "no metrics": (record(metrics={}, curves={}, diverged={}), "metrics"),
    "metric for two of three seeds": (record(metrics={"relu": {"loss": [1.0, 2.0]}}, diverged={}), "relu.loss"),
    "metric as one number": (record(metrics={"relu": {"loss": 1.0}}, diverged={}), "relu.loss"),
    "metric nan": (record(metrics={"relu": {"loss": [1.0, math.nan, 2.0]}}, diverged={}), "relu.loss"),
    "metric null without a reason": (record(diverged={}), "g=0.32.loss"),
    "metric true": (record(metrics={"relu": {"loss": [1.0, True, 2.0]}}, diverged={}), "relu.loss"),
    "metric as text": (record(metrics={"relu": {"loss": [1.0, "2", 2.0]}}, diverged={}), "relu.loss"),
    "metric huge": (record(metrics={"relu": {"loss": [1.0, HUGE, 2.0]}}, diverged={}), "relu.loss"),
    "metric name with a dot": (record(metrics={"relu": {"a.b": [1.0, 1.0, 2.0]}}, diverged={}), "a.b"),
    "variant in unicode": (record(metrics={"β": {"loss": [1.0, 1.0, 2.0]}}, curves={}, diverged={}), "β"),
    "variant without metrics": (record(metrics={"relu": {}}, curves={}, diverged={}), "metrics.relu"),
    "curve name with a dot": (record(curves={"relu": {"a.b": {"x": [1], "y": [[1.0]] * 3}}}), "a.b"),
    "curve of 201 points": (
        record(curves={"relu": {"loss": {"x": list(range(201)), "y": [[0.0] * 201] * 3}}}),
        "curves.relu.loss",
    ),
    "curve without points": (record(curves={"relu": {"loss": {"x": [], "y": [[], [], []]}}}), "curves.relu.loss"),
    "curve of one seed": (record(curves={"relu": {"loss": {"x": [1], "y": [[1.0]]}}}), "curves.relu.loss"),
    "ragged curve": (record(curves={"relu": {"loss": {"x": [1, 2], "y": [[1.0]] * 3}}}), "curves.relu.loss"),
    "curve with null": (record(curves={"relu": {"loss": {"x": [1], "y": [[1.0], [None], [1.0]]}}}), "curves.relu.loss"),
    "curve with null x": (record(curves={"relu": {"loss": {"x": [None], "y": [[1.0]] * 3}}}), "curves.relu.loss"),
    "curve with extra field": (record(curves={"relu": {"loss": {"x": [1], "y": [[1.0]] * 3, "z": 1}}}), "curves.relu"),
    "curve of an unknown variant": (record(curves={"x": {"loss": {"x": [1], "y": [[1.0]] * 3}}}), "curves.x"),
    "diverged seed unknown": (record(diverged={"g=0.32": {"1": "why", "7": "why"}}), "diverged.g=0.32"),
    "diverged without a reason": (record(diverged={"g=0.32": {"1": ""}}), "diverged.g=0.32.1"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_each_fault_is_found_and_named_in_a_sentence(name: str) -> None:
    data, field = FAULTY[name]
    found = faults(data)
    assert found
    assert any(field in sentence for sentence in found), found
    assert all(sentence.endswith(".") and "\n" not in sentence and len(sentence) < 400 for sentence in found)


@pytest.mark.parametrize("data", [None, [], "text", 3, {}])
def test_what_is_no_record_at_all_is_refused(data: Any) -> None:
    assert faults(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        (Record(**record()).to_json()[:-10], "not valid JSON"),
        ('{"id": NaN}', "NaN"),
        ('{"id": "a", "id": "b"}', "'id' appears twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"seeds": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_damaged_file_is_one_clear_error(text: str, says: str) -> None:
    with pytest.raises(RecordError, match=says) as caught:
        Record.from_json(text, source="x.json")
    assert str(caught.value).startswith("x.json")
    assert "\n" not in str(caught.value)


def test_load_reads_only_a_record_whose_id_is_its_file_name(tmp_path: Any) -> None:
    (tmp_path / "some-run.json").write_text(Record(**record()).to_json())
    (tmp_path / "other.json").write_text(Record(**record()).to_json())
    assert load("some-run", tmp_path).id == "some-run"
    with pytest.raises(RecordError, match="carries the id 'some-run'"):
        load("other", tmp_path)
    with pytest.raises(RecordError, match="the records are other, some-run"):
        load("third", tmp_path)
    with pytest.raises(RecordError, match="no record"):
        load("third", tmp_path / "missing")


@pytest.mark.parametrize("bad", ["../some-run", "a/b", "", "A", "a\x00b", "é", "a" * 65, None, 3, "some-run\n"])
def test_load_refuses_ids_that_are_no_names(bad: Any, tmp_path: Any) -> None:
    (tmp_path.parent / "some-run.json").write_text(Record(**record()).to_json())
    with pytest.raises(RecordError, match="no record id"):
        load(bad, tmp_path)


def test_a_binary_file_is_a_clear_error(tmp_path: Any) -> None:
    (tmp_path / "some-run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="cannot be read"):
        load("some-run", tmp_path)
