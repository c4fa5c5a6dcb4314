"""Bundled text: every State of the Union address, split by year."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from depthlab.data.files import bundle


class Text(NamedTuple):
    """Training, validation and test text (plain strings), and their origin."""

    train: str
    validation: str
    test: str
    source: str


class Address(NamedTuple):
    """One State of the Union address."""

    year: int
    speaker: str
    text: str


def split_of(year: int) -> str:
    """Split of a year: years ending in 4 are "validation", in 9 "test", all others "train"."""
    return {4: "validation", 9: "test"}.get(year % 10, "train")


def to_lines(addresses: Iterable[Address]) -> bytes:
    """The bundle's content: one JSON object a line, in the order given."""
    return "".join(json.dumps(a._asdict(), ensure_ascii=False) + "\n" for a in addresses).encode("utf-8")


def addresses() -> list[Address]:
    """All bundled addresses, oldest first; two presidents spoke in 1953 and in 1961, none in 1933.

    Raises:
        DataError: the bundle is missing or damaged.
    """
    # split("\n") and not splitlines(): only our own line end separates addresses.
    lines = bundle("text", "sotu.jsonl").decode("utf-8").split("\n")[:-1]
    return [Address(**json.loads(line)) for line in lines]


def text(name: str = "sotu") -> Text:
    """The bundled text `name`, split so that no year stands in two splits.

    Addresses follow each other by year, separated by an empty line; inside an address there is no line break.

    Args:
        name: "sotu", the State of the Union addresses 1790 to 2021 (the only bundled text).

    Raises:
        ValueError: another name.
        DataError: the bundle is missing or damaged.
    """
    if name != "sotu":
        raise ValueError(f'text({name!r}) is not bundled; use "sotu", or hub_text() for files and hub datasets.')
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    everything = addresses()
    for address in everything:
        parts[split_of(address.year)].append(address.text)
    years = f"{everything[0].year} to {everything[-1].year}"
    source = f"bundle: {len(everything)} State of the Union addresses, {years}"
    return Text(**{split: "\n\n".join(texts) for split, texts in parts.items()}, source=source)
