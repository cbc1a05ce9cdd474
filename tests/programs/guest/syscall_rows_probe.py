import json, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import ringfence
from ringfence.guest.launch import syscall_rows as program
code = '''
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kept = ("Uid", "Gid", "Groups", "NSpid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
        "Seccomp_filters")
mounts = [line.split() for line in open("/proc/self/mountinfo")]
print(json.dumps({
    "status": [status[name] for name in kept if name in ("Uid", "Gid") or name in status],
    "mounts": sorted(" ".join((row[4], row[5], row[row.index("-") + 1])) for row in mounts),
    "limits": open("/proc/self/limits").read(),
    "open": sorted(os.readlink("/proc/self/fd/" + fd).partition(":")[0] for fd in os.listdir("/proc/self/fd")[:-1]),
    "mapped": [line.split()[5] for line in open("/proc/self/maps") if "memfd" in line],
}))
'''
run = ringfence.run(code)
with ringfence.Sandbox() as box:
    left = box.exec(["sh", "-c", "sleep 60 & echo $!"], timeout_s=5)
    killed = box.exec(["sleep", "60"], timeout_s=0.3)
    later = box.run("1 + 1")
print(json.dumps([program.routine() is not None, run.stderr, run.stdout, left.status, killed.status, later.value]))
