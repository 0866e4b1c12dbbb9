"""Words for an estimate of the evidence: converged, no contradiction found, or not converged and why."""

from collections import Counter

__all__ = ["ADVICE", "verdict"]

ADVICE = {
    "empty": "no chain ended where the density is positive: start from a wider distribution",
    "broken": "more than 1 % of its chains met a density that could not be evaluated: check the model's numerics",
    "coarse": "rounding of its log density, or of a constrained parameter, exceeds the tolerance: use float64, leave "
    "out constants, or turn an interval around, since numbers are finest near 0",
    "stuck": "its chains hardly move (acceptance far below the target): let the pilot choose the step sizes, or give "
    "smaller ones",
    "unfinished": "the pilot used up its temperatures before it reached the density: start closer to it",
    "elsewhere": "chains from a wider start ended where no weighted chain did: mass is missed, start from a wider "
    "distribution",
    "hidden": "a narrow mode holds a share of the mass that the chains do not show: start around it",
    "disagreeing": "an estimate from another start differs: raise max_steps, or start from a wider distribution",
    "drifting": "its chains drift when they move on at the last temperature, so they have not arrived: raise max_steps",
    "moving": "it still moved by more than the tolerance when temperatures were doubled: raise max_steps",
    "few": "fewer than a tenth of its chains carry the weight: use more temperatures",
    "tail": "its weights have a heavy tail (k > 0.7): use more temperatures, or start from a wider distribution",
    "noisy": "its standard error exceeds twice the tolerance: use more chains, or more temperatures",
}
"""What can speak against an estimate, and what helps; causes first, symptoms last."""


def verdict(doubts: list[tuple[str, ...]], confirmed: list[bool] | None = None) -> str:
    """One sentence over the `doubts` of many data.

    Args:
        doubts: keys of `ADVICE` that speak against each datum's estimate.
        confirmed: whether independent evidence agrees with it; of no datum if None.

    >>> verdict([(), ()], [True, True]), verdict([()], [False])
    ('converged', 'no contradiction found')
    """
    number, unsure = len(doubts), sum(bool(found) for found in doubts)
    if unsure:
        counted = Counter(name for found in doubts for name in found)
        share = f"{unsure} of {number}: " if number > 1 else ""
        reasons = [f"{advice} [{counted[name]}]" for name, advice in ADVICE.items() if counted[name]]
        return f"not converged, because ({share}" + "; ".join(reasons) + ")"
    sure = sum(confirmed or [])
    if sure == number:
        return "converged"
    return f"no contradiction found, converged for {sure} of {number}" if sure else "no contradiction found"
