"""Published advice on the settings, each with its source and the range it was found in."""

import math
from typing import NamedTuple

from diloco.config import DiLoCoConfig


class Advice(NamedTuple):
    """One recommendation."""

    setting: str  # a field of `DiLoCoConfig`, or of training
    value: float | str  # what to use
    source: str  # where it was found
    valid: str  # the range it was found in
    warning: str = ""  # why this case, or the value that was asked for, is outside of it


_SCALING = "Charles et al. 2025"
_STREAMING = "Douillard et al. 2025"
_OUTER = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}  # Charles et al., Figure 7, from 335M parameters up

# Charles et al., Tables 7 to 9: A and a of A N^a for data parallel (0) and for M islands.
_FITS = {
    "loss": {
        0: (18.129, -0.0953),
        1: (18.363, -0.0961),
        2: (18.768, -0.0969),
        4: (19.762, -0.0992),
        8: (21.051, -0.1018),
    },
    "learning_rate": {
        0: (16319.2, -0.819),
        1: (74620.6, -0.945),
        2: (3978.82, -0.780),
        4: (4512.99, -0.789),
        8: (618986.0, -1.102),
    },
    "batch_sequences": {
        0: (0.22592, 0.281),
        1: (0.01361, 0.435),
        2: (0.00769, 0.479),
        4: (0.00535, 0.510),
        8: (0.01859, 0.455),
    },
}
# Table 10: A, a and b of A N^a M^b.
_JOINT = {
    "loss": (19.226, -0.0985, 0.0116),
    "learning_rate": (22256.0, -0.8827, 0.2929),
    "batch_sequences": (0.00709, 0.4695, 0.3399),
}


def outer_learning_rate(num_islands: int) -> Advice:
    """Recommended outer learning rate for M islands, with outer momentum 0.9.

    Args:
        num_islands: M.

    Returns:
        The advice; between and beyond 1, 2, 4, 8 islands the nearest in ratio, with a warning.

    Example:
        >>> outer_learning_rate(8).value, outer_learning_rate(2).value
        (0.8, 0.6)

    References:
        :cite:t:`charles2025scaling` (Figure 7).
    """
    nearest = min(_OUTER, key=lambda m: abs(math.log(m / num_islands)))
    warning = (
        "" if nearest == num_islands else f"no result for {num_islands} islands; as for {nearest}"
    )
    valid = "M in 1, 2, 4, 8; H = 30; 335M to 2.4B parameters; the optimum rises with H"
    return Advice("outer_learning_rate", _OUTER[nearest], f"{_SCALING}, Figure 7", valid, warning)


def scaling_law(
    quantity: str, parameters: float, num_islands: int, *, joint: bool = False
) -> Advice:
    r"""Published power law in the size of the model, :eq:`eq-scaling-law`.

    Args:
        quantity: `"loss"` (nats a token at 20 tokens a parameter), `"learning_rate"` (peak of the
            inner AdamW), or `"batch_sequences"` (over all islands, of 2,048 tokens each).
        parameters: N.
        num_islands: M; 0 is data parallel.
        joint: Whether to use the fit over N and M in place of the one for this M. It is used anyway
            where M has no fit of its own.

    Returns:
        The advice. The power law has no constant term, so it is low for large models: 2.020 nats
        for data parallel at 10B, where 2.090 was measured.

    Raises:
        ValueError: If the quantity is not known, or no parameter or a negative M is given.

    Example:
        >>> round(scaling_law("loss", 1.3e9, 2).value, 3)  # measured: 2.464
        2.456
        >>> round(scaling_law("batch_sequences", 1.3e9, 2).value)
        178

    References:
        :cite:t:`charles2025scaling` (Tables 7 to 10). It calls the batch tokens; only as sequences
        of 2,048 tokens do the fits fall inside its own figures.
    """
    if quantity not in _FITS:
        raise ValueError(f"quantity {quantity!r} is not known; use one of {', '.join(_FITS)}")
    if parameters < 1 or num_islands < 0:
        raise ValueError(
            f"parameters {parameters:g} and num_islands {num_islands} are out of range; "
            "use at least 1 and 0"
        )
    if joint or num_islands not in _FITS[quantity]:
        factor, power, island_power = _JOINT[quantity]
        value = factor * parameters**power * max(num_islands, 1) ** island_power
        source = f"{_SCALING}, Table 10"
    else:
        factor, power = _FITS[quantity][num_islands]
        value = factor * parameters**power
        source = f"{_SCALING}, Table {7 + list(_FITS).index(quantity)}"
    warnings = []
    if not 35e6 <= parameters <= 2.4e9:
        checked = "; checked at 4B and 10B for M up to 4" if 2.4e9 < parameters <= 10e9 else ""
        warnings.append(f"{parameters:.3g} parameters are outside 35M to 2.4B{checked}")
    if num_islands > 8:
        warnings.append(f"{num_islands} islands are beyond 8")
    valid = "35M to 2.4B parameters; M up to 8; H = 30; 20 tokens a parameter; C4"
    return Advice(quantity, value, source, valid, "; ".join(warnings))


def advise(config: DiLoCoConfig, parameters: float, num_layers: int) -> list[Advice]:
    """All advice for a run, with a warning where its own setting is outside of what was tried.

    Args:
        config: The run's settings.
        parameters: N.
        num_layers: L.

    Returns:
        One entry a setting.

    Example:
        >>> config = DiLoCoConfig(num_islands=2, sync_period=37, num_fragments=37)
        >>> [a.warning for a in advise(config, 8.2e9, 36) if a.setting == "num_fragments"]
        ['H = P = 37 exchanges a fragment every inner step']
    """
    h, p, v = config.sync_period, config.num_fragments, config.overlap_steps
    rate = outer_learning_rate(config.num_islands)
    if not 0.5 <= config.outer_learning_rate / float(rate.value) <= 2:
        far = f"{config.outer_learning_rate:g} is over a factor of 2 from it"
        rate = rate._replace(warning="; ".join(filter(None, (rate.warning, far))))
    every = f"H = P = {h} exchanges a fragment every inner step" if 1 < h == p else ""
    return [
        rate,
        Advice(
            "outer_momentum",
            0.9,
            f"Douillard et al. 2023, Table 5; {_SCALING}",
            "Nesterov; 0.8 to 0.95 were tried",
            "" if 0.8 <= config.outer_momentum <= 0.95 else f"{config.outer_momentum:g} was not",
        ),
        Advice(
            "sync_period",
            "30 to 500",
            f"Douillard et al. 2023, Section 3.1; {_STREAMING}, Section 3.2",
            "H = 1000 costs 2.9 % perplexity over H = 50; H = 100 up to 4B parameters; "
            "H = 1 is the worst",
            "" if 30 <= h <= 500 else f"{h} is outside",
        ),
        Advice(
            "num_fragments",
            1 + max(1, round(num_layers / 3)),
            f"{_STREAMING}, Section 3.3.1 (3 layers a fragment, strided)",
            "6 to 48 layers trained; the fragment of the embedding is ours",
            every,
        ),
        Advice(
            "overlap_steps",
            "1 to 5",
            f"{_STREAMING}, Section 3.3.2",
            "10 steps cost under 0.2 % of the loss; the window must hold the burst",
            "" if v <= 5 else f"{v} is beyond 5",
        ),
        Advice(
            "mixing",
            0.5 if v else 0.0,
            f"{_STREAMING}, Section 3.3.2",
            "0 and 0.5 were tried; the value of the main runs is not stated",
            "" if config.mixing in (0.0, 0.5) else f"{config.mixing:g} was not",
        ),
        scaling_law("learning_rate", parameters, config.num_islands),
        scaling_law("batch_sequences", parameters, config.num_islands),
        scaling_law("loss", parameters, config.num_islands),
    ]


def maxtext_heuristics(num_layers: int) -> list[Advice]:
    """What MaxText's tutorial recommends, with what the papers found in place of a warning.

    Args:
        num_layers: L.

    Returns:
        One entry a setting.

    Example:
        >>> maxtext_heuristics(36)[0].value
        'H = P = 37'

    References:
        :cite:t:`maxtext2026` (tutorial, tuning guidelines).
    """
    source = "MaxText tutorial, Section 7"
    return [
        Advice(
            "sync_period",
            f"H = P = {num_layers + 1}",
            source,
            "stated without a measurement",
            "one exchange every inner step: no step is free of latency, and with V = 0 each one "
            "waits; the papers train 3 layers a fragment with H of 30 and 100",
        ),
        Advice(
            "outer_learning_rate",
            "0.3 to 0.9",
            source,
            "stated without a measurement; the default is 0.3, its two scripts use 0.1",
            "0.4 to 0.8 by the number of islands (Charles et al., Figure 7); 0.1 is the lowest "
            "rate that the first paper tried, and it chose 0.7",
        ),
        Advice(
            "learning_rate",
            "higher inner, lower outer",
            source,
            "stated without a measurement",
            "Charles et al. tune both: the best outer rate does not change with the model's size "
            "while the best inner rate falls with it; no paper here varies one at a fixed other",
        ),
        Advice(
            "overlap_steps",
            "0 or 1",
            source,
            "one program for all islands, which cannot overlap",
            "1 in the main runs, at most 5 (Douillard et al. 2025); V > 0 hides traffic only "
            "where islands are processes of their own",
        ),
    ]


def table(advice: list[Advice], last: str = "mind") -> str:
    """Returns advice as a Markdown table, one setting a row.

    Args:
        advice: What `advise` returns.
        last: Head of the column with the warnings.

    Returns:
        The text.

    Example:
        >>> print(table([Advice("mixing", 0.5, "a paper", "1B")]))
        | setting | value | source | range | mind |
        | --- | --- | --- | --- | --- |
        | `mixing` | 0.5 | a paper | 1B |  |
    """
    lines = [["setting", "value", "source", "range", last], ["---"] * 5]
    for a in advice:
        value = f"{a.value:.3g}" if isinstance(a.value, float) else str(a.value)
        lines.append([f"`{a.setting}`", value, a.source, a.valid, a.warning])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
