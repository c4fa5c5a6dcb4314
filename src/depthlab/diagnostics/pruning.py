"""How much the loss grows when a block is left out."""

import math
from collections.abc import Callable

import pandas as pd


def block_pruning(loss: Callable[[frozenset[int]], float], n_sublayers: int, block: int = 2) -> pd.DataFrame:
    """Leave out each block of consecutive sublayers in turn. One row a block: block, layers, loss, increase.

    Args:
        loss: loss of the model without the given sublayers; ``Residual.forward(.., skip=..)`` leaves them out, by the
            rule that the state stays and the next sublayer reads by its own query.
        n_sublayers: of the model.
        block: sublayers a block; 2 is an attention and its MLP.

    Returns:
        The table; `increase` is over the loss with nothing left out.

    Raises:
        ValueError: `n_sublayers` is no multiple of `block`, or a loss is NaN.
    """
    if block < 1 or n_sublayers < 1 or n_sublayers % block:
        raise ValueError(f"{n_sublayers} sublayers do not form blocks of {block}; use a divisor.")

    def checked(skip: frozenset[int]) -> float:
        value = float(loss(skip))
        if math.isnan(value):
            raise ValueError(f"The loss without sublayers {sorted(skip)} is NaN; nothing can be compared with it.")
        return value

    whole = checked(frozenset())
    rows = []
    for number in range(n_sublayers // block):
        layers = tuple(range(number * block, (number + 1) * block))
        value = checked(frozenset(layers))
        rows.append({"block": number, "layers": layers, "loss": value, "increase": value - whole})
    return pd.DataFrame(rows)
