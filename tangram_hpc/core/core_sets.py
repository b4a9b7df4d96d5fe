"""Pure. Which units of a node are free, as one bit mask over the node's own order of units.

Law: units are taken lowest position first, so the node's order (one NUMA domain after the other)
decides locality. Taking or giving n units costs O(n).
"""

from __future__ import annotations


class CoreSet:
    """The units a node lends, and which of them are free."""

    __slots__ = ("_position", "free_mask", "units")

    def __init__(self, units: tuple[int, ...]) -> None:
        self.units = units
        self._position = {unit: i for i, unit in enumerate(units)}
        assert len(self._position) == len(units), f"a unit is named twice: {units}"
        self.free_mask = (1 << len(units)) - 1

    @property
    def free(self) -> int:
        """How many units are free."""
        return self.free_mask.bit_count()

    def choose(self, n: int, mask: int) -> tuple[tuple[int, ...], int]:
        """`n` units out of `mask` (not taken yet) and the mask without them."""
        chosen: list[int] = []
        for _ in range(n):
            low = mask & -mask
            assert low, f"{n} units wanted, {len(chosen)} are free"
            chosen.append(self.units[low.bit_length() - 1])
            mask ^= low
        return tuple(chosen), mask

    def is_free(self, unit: int) -> bool:
        """Whether this unit is free."""
        return bool(self.free_mask >> self._position[unit] & 1)

    def mask(self, units: tuple[int, ...]) -> int:
        """These units as a mask."""
        return sum(1 << self._position[unit] for unit in units)

    def take(self, units: tuple[int, ...]) -> None:
        """Marks these units as lent; each must be free."""
        for unit in units:
            bit = 1 << self._position[unit]
            assert self.free_mask & bit, f"unit {unit} is lent twice"
            self.free_mask ^= bit

    def give(self, units: tuple[int, ...]) -> None:
        """Marks these units as free; each must be lent."""
        for unit in units:
            bit = 1 << self._position[unit]
            assert not self.free_mask & bit, f"unit {unit} is given back twice"
            self.free_mask |= bit
