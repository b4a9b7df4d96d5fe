"""Pure. Which units of a node are free, as one bit mask over the node's own order of units.

Units that are taken together are neighbours, because neighbouring cores share caches and memory.
They come from one group of neighbours, on the smallest level of groups on which one has room. Among
the groups of that level, the one with preferred units comes first, then those within the same
larger group as the preferred units, then the one with the fewest free units, so that large free
ranges stay; at last the one at the lowest position. Taking or giving n units costs O(n), choosing
them O(groups + n).
"""

from __future__ import annotations

from itertools import accumulate

_Room = tuple[bool, int, int]  # (has no preferred unit, free units, mask of the group)


class CoreSet:
    """The units that a node lends, and which of them are free.

    Args:
        units: the units in the node's order.
        groups: the groups of neighbours that share caches or memory, level by level from the
            smallest groups to the largest. A level is the sizes of consecutive groups, which add up
            to all units. A level whose sizes do not add up is left out.
    """

    __slots__ = ("_levels", "_position", "free_mask", "units")

    def __init__(self, units: tuple[int, ...], groups: tuple[tuple[int, ...], ...] = ()) -> None:
        self.units = units
        self._position = {unit: i for i, unit in enumerate(units)}
        assert len(self._position) == len(units), f"a unit is named twice: {units}"
        self.free_mask = (1 << len(units)) - 1
        self._levels = [
            [((1 << size) - 1) << end - size
             for size, end in zip(sizes, accumulate(sizes), strict=True)]
            for sizes in groups if sum(sizes) == len(units) and min(sizes, default=0) > 0]

    @property
    def free(self) -> int:
        """How many units are free."""
        return self.free_mask.bit_count()

    def choose(self, n: int, mask: int, preferred: tuple[int, ...] = ()
               ) -> tuple[tuple[int, ...], int]:
        """Chooses units; changes nothing.

        Args:
            n: how many units to choose.
            mask: the units to choose from.
            preferred: units that are taken first if they are in `mask`; otherwise units near them
                are.

        Returns:
            The chosen units, and `mask` without them.
        """
        assert mask.bit_count() >= n, f"{n} units wanted, {mask.bit_count()} are free"
        wished = self._mask_of_known(preferred)
        room = self._room(n, mask, wished)
        chosen = self._lowest(n, room & wished)
        chosen |= self._lowest(n - chosen.bit_count(), room & ~chosen)
        return self._units_of(chosen), mask & ~chosen

    def _room(self, n: int, mask: int, wished: int) -> int:
        """The part of `mask` in the smallest group that has room for n units."""
        for depth, level in enumerate(self._levels):
            rooms = [(not group & wished, (mask & group).bit_count(), group) for group in level
                     if (mask & group).bit_count() >= n]
            if rooms:
                elsewhere, _, group = min(rooms)
                if elsewhere and wished:
                    _, _, group = min(self._beside(rooms, wished, depth))
                return mask & group
        return mask

    def _beside(self, rooms: list[_Room], wished: int, depth: int) -> list[_Room]:
        """The groups that share a larger group, as small as possible, with preferred units; else
        all.
        """
        for level in self._levels[depth + 1:]:
            home = sum(group for group in level if group & wished)
            if preferred := [room for room in rooms if room[2] & home]:
                return preferred
        return rooms

    @staticmethod
    def _lowest(n: int, mask: int) -> int:
        """The `n` lowest units of a mask; all of them if there are fewer."""
        chosen = 0
        for _ in range(min(n, mask.bit_count())):
            low = mask & -mask
            chosen |= low
            mask ^= low
        return chosen

    def _units_of(self, mask: int) -> tuple[int, ...]:
        found = []
        while mask:
            low = mask & -mask
            found.append(self.units[low.bit_length() - 1])
            mask ^= low
        return tuple(found)

    def _mask_of_known(self, units: tuple[int, ...]) -> int:
        """These units as a mask. Units of another node are left out."""
        return sum(1 << self._position[unit] for unit in units if unit in self._position)

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
