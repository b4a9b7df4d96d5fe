# In the virtual machine: a real Slurm on cgroup v2 with the SPANK plugin $1; says what a user's steps see.
top=/sys/fs/cgroup
hostname vm
echo "127.0.0.1 vm" >>/etc/hosts
ip addr add 10.99.0.1/32 dev lo # without an address that is no loopback, Slurm resolves nothing
mkdir $top/system.slice         # systemd would have
for controller in cpuset cpu memory pids; do
    echo "+$controller" >$top/cgroup.subtree_control
    echo "+$controller" >$top/system.slice/cgroup.subtree_control
done
cp "$1" /run/tangram.so
dc() { slurm/devcluster/devcluster "$@" --prefix /run/dc; }
dc up --name vm --cpu-nodes 1 --gpu-nodes 0 --trainer-nodes 0 --cpus-per-node 2 --no-dbd --cgroups \
    --plugin /run/tangram.so || exit 1
home=/run/dc/home
mkdir $home/lib && cp -r tangram_hpc $home/lib
user() { slurm/devcluster/devcluster exec --prefix /run/dc --setenv PYTHONPATH=$home/lib -- "$@"; }

cat >$home/probe.py <<'END'
import os
from tangram_hpc.resources.cpu import enforce
found = enforce.probe(True)
print("SAW", found.name, *sorted(found.limits), os.getuid() > 0)
found.close()
END
# binds a child to one of two cores, and waits with it
cat >$home/hold.py <<'END'
import os, subprocess, time
from tangram_hpc.resources.cpu import cgroupfs, enforce
found = enforce.probe(True)
first = min(os.sched_getaffinity(0))
child = subprocess.Popen(["sleep", "7654"])
group = found.group(1, child.pid)
cgroupfs.put(group.folders[0], child.pid)
bound = group.bind((first,), 1) and os.sched_getaffinity(child.pid) == {first}
print("SAW bound", bound, len(os.sched_getaffinity(0)), flush=True)
time.sleep(600)
END
user srun --tangram -n1 -c2 /usr/bin/python3 probe.py
user srun --tangram=off -n1 -c2 /usr/bin/python3 probe.py
user sbatch --tangram -n1 -c2 -o hold.out --wrap 'exec /usr/bin/python3 hold.py'
for _ in $(seq 300); do grep -q SAW $home/hold.out 2>/dev/null && break; sleep 0.2; done
cat $home/hold.out
pgrep -f 'sleep 7654' >/dev/null && echo "SAW child"
user scancel -u vmuser
for _ in $(seq 150); do [ -z "$(user squeue -h)" ] && break; sleep 0.2; done
pgrep -f 'sleep 7654' >/dev/null || echo "SAW ended"
user srun --tangram -n2 true && echo "SAW again"
sleep 1
echo "SAW left $(find $top -name 'tangram-*' -o -name 'job_*' | wc -l) $(user sinfo -h -o %T)"
grep tangram: /run/dc/log/slurmd-vmc1.log
dc down
