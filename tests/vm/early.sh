#!/bin/busybox sh
# The first program in the virtual machine: mounts the host's files beneath a tmpfs as the root.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
for module in $($B cat /modules/order); do
  $B insmod "/modules/$module" || echo "TANGRAM-VM no module $module"
done
$B mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 host /lower
$B mount -t tmpfs -o size=70% over /over
$B mkdir /over/up /over/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/over/up,workdir=/over/work root /new
for kind in proc sysfs devtmpfs; do
  case $kind in proc) at=proc ;; sysfs) at=sys ;; *) at=dev ;; esac
  $B mount -t $kind $kind /new/$at
done
$B mount -t tmpfs run /new/run
$B cp /bin/busybox /guest.sh /settings /new/run/
$B umount /proc /sys /dev
exec $B switch_root /new /run/busybox sh /run/guest.sh
