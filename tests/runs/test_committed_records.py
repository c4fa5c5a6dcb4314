"""Every record in data/results is sound, says where it comes from, and still belongs to its experiment."""

import platform
import re

import pytest

from depthlab import claims, runs
from depthlab.ledger import read_ledger


@pytest.mark.parametrize("record_id", runs.record_ids())
def test_a_committed_record_is_current_and_has_provenance(record_id: str) -> None:
    record = claims.current_record(record_id)  # valid, listed in the ledger, made with the current config
    assert re.fullmatch("[0-9a-f]{40}", record.commit), f"{record_id} does not say which commit made it"
    assert record.command == f"depthlab runs make {record_id}"
    text = record.to_json()
    assert platform.node() not in text or len(platform.node()) < 4
    assert not re.search(r'"[^"]*(/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\)', text)


def test_every_listed_record_is_there() -> None:
    assert sorted(read_ledger().records) == runs.record_ids()
