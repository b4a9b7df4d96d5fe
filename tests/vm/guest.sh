# The virtual machine's init: its file systems, one command, and the end.
B=/run/busybox
. /run/settings
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run/home LANG=C.UTF-8 PYTHONPATH="$REPO" PYTHONDONTWRITEBYTECODE=1 TERM=dumb
$B mkdir -p /dev/pts /dev/shm /run/home
$B mount -t devpts devpts /dev/pts
$B mount -t tmpfs -o mode=1777 shm /dev/shm
$B mount -t cgroup2 cgroup2 /sys/fs/cgroup
$B ip link set lo up
$B ln -sf /proc/self/fd /dev/fd
cd "$REPO" || exit 1
echo "TANGRAM-VM $($B uname -r), controllers: $($B cat /sys/fs/cgroup/cgroup.controllers)"
home=/sys/fs/cgroup
if [ "$WHO" = 0 ]; then
  /bin/sh -c "$COMMAND"
  status=$?
else
  # what another user needs to reach the interpreter and this tree
  for path in $PREFIXES "$REPO"; do
    while [ "$path" != / ]; do
      $B chmod o+rx "$path"
      path=$($B dirname "$path")
    done
  done
  $B chown "$WHO:$WHO" /run/home
  for controller in cpuset cpu memory pids; do
    echo "+$controller" > $home/cgroup.subtree_control
  done
  home=$home/delegated
  $B mkdir $home
  for file in . cgroup.procs cgroup.threads cgroup.subtree_control; do
    $B chown "$WHO:$WHO" $home/$file
  done
  (
    echo 0 > $home/cgroup.procs
    exec /usr/bin/setpriv --reuid "$WHO" --regid "$WHO" --clear-groups /bin/sh -c "$COMMAND"
  )
  status=$?
fi
left=$($B find $home -mindepth 1 -type d -name 'tangram-*')
[ -z "$left" ] || echo "TANGRAM-VM LEFT $left"
echo "TANGRAM-VM ENDED $status"
$B sync
$B poweroff -f
