"""Find which of many changes break something, with few trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")



def first_offender(items: Sequence[T], breaks: Callable[[Sequence[T]], bool]) -> int:
    """The index of the item that breaks it: the prefix before it is fine, with it it is broken.

    Args:
        items: changes in the order in which they apply; all of them together break it.
        breaks: tries a prefix. Called about log2(len(items)) times.
    """
    low, high = 0, len(items)  # items[:low] is fine, items[:high] breaks
    while high - low > 1:
        middle = (low + high) // 2
        if breaks(items[:middle]):
            high = middle
        else:
            low = middle
    return high - 1


def offenders(items: Sequence[T], breaks: Callable[[Sequence[T]], bool], budget: int = 64) -> list[T]:
    """A set of items without which the others are fine, found one after the other.

    Args:
        items: changes in the order in which they apply; all of them together break it.
        breaks: tries a subset (in order).
        budget: at most about so many trials; when it is spent, all items still in doubt are given back as well.
    """
    spent = 0

    def counted(subset: Sequence[T]) -> bool:
        nonlocal spent
        spent += 1
        return breaks(subset)

    left = list(items)
    found: list[T] = []
    while left:
        if spent >= budget:
            return found + left
        found.append(left.pop(first_offender(left, counted)))
        if not counted(left):
            return found
    return found
