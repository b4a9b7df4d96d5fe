"""Pure. Placers: who starts where on how many units. One file each behind `base.Placer`."""
