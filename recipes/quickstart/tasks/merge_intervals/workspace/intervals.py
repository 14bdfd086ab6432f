"""Closed intervals of integers, as (first, last) pairs with first <= last."""


def merge(intervals):
    """The fewest intervals that cover the same integers, in order.

    Intervals that overlap or are adjacent, as (1, 2) and (3, 4), become one.
    """
    merged = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def total(intervals):
    """How many integers the intervals cover together."""
    return sum(last - first + 1 for first, last in merge(intervals))
