"""`check`: the verdict line of a notebook.

A trained number does not survive a change of CPU, so a notebook never compares one. It states what must hold of the
number, and prints a line that is the same on every machine.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "in": lambda value, bound: bound[0] <= value <= bound[1],
}


class CheckFailed(AssertionError):
    """A stated relation does not hold; the message shows the value."""


def check(name: str, value: float, relation: str, bound: float | tuple[float, float]) -> None:
    """Print ``PASS  <name>`` if `value` stands in `relation` to `bound`; raise otherwise.

    Args:
        name: what is being claimed, in words a reader understands.
        value: one number (also a one-element tensor or array). NaN holds no relation, so it fails.
        relation: ``<  <=  >  >=  ==  in``; ``in`` takes a closed interval.
        bound: a number, or ``(low, high)`` for ``in``.

    Raises:
        CheckFailed: the relation does not hold; only this message shows the value.
        ValueError: unknown relation, a bound that is NaN, or an interval that is empty or not a pair.
        TypeError: `value` or `bound` is not a real number.
    """
    number, limit = _numbers(name, value, relation, bound)
    if not _RELATIONS[relation](number, limit):
        wanted, got = _show(limit), _show(number)
        if got in wanted.strip("[]").split(", "):  # rounded, they would look as if the relation held
            wanted, got = _show(limit, exact=True), _show(number, exact=True)
        raise CheckFailed(f"{name}: expected {relation} {wanted}, got {got}.")
    print(f"PASS  {name}")


def holds(name: str, value: float, relation: str, bound: float | tuple[float, float]) -> bool:
    """Whether `value` stands in `relation` to `bound`; arguments and errors as in `check`, nothing printed."""
    number, limit = _numbers(name, value, relation, bound)
    return _RELATIONS[relation](number, limit)


def _numbers(name: str, value: Any, relation: str, bound: Any) -> tuple[float, float | tuple[float, float]]:
    if not isinstance(relation, str) or relation not in _RELATIONS:
        raise ValueError(f"check({name!r}) got relation {relation!r}; use one of {', '.join(_RELATIONS)}.")
    number = _as_number(name, "value", value)
    limit = _as_interval(name, bound) if relation == "in" else _as_number(name, "bound", bound)
    if relation != "in" and math.isnan(limit):
        raise ValueError(f"check({name!r}) got the bound nan, which nothing satisfies; give a number.")
    return number, limit


def _as_number(name: str, role: str, x: Any) -> float:
    """One real number; integers keep their exactness, one-element tensors and arrays are unwrapped."""
    if callable(getattr(x, "item", None)):
        try:
            x = x.item()
        except (ValueError, RuntimeError):
            raise TypeError(f"check({name!r}) got a {role} that is not one element; reduce it to one first.") from None
    if isinstance(x, int | float):
        return x
    raise TypeError(f"check({name!r}) got a {role} of type {type(x).__name__}; give one real number (int or float).")


def _as_interval(name: str, bound: Any) -> tuple[float, float]:
    if not isinstance(bound, tuple | list) or len(bound) != 2:
        raise ValueError(f"check({name!r}) with 'in' got the bound {bound!r}; give (low, high).")
    low, high = (_as_number(name, "bound", b) for b in bound)
    if not low <= high:
        raise ValueError(f"check({name!r}) with 'in' got ({low}, {high}), which holds no number; give low <= high.")
    return low, high


def _show(x: float | tuple[float, float], exact: bool = False) -> str:
    if isinstance(x, tuple):
        return f"[{_show(x[0], exact)}, {_show(x[1], exact)}]"
    if isinstance(x, int):
        return str(x) if abs(x) < 10**40 else "an integer of more than 40 digits"
    return repr(x) if exact else f"{x:.6g}"
