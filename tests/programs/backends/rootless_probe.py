import json, os, sys
sys.path.append(SDK)
os.environ.update(VARIABLES)
import ringfence
from ringfence import Policy, Sandbox
from ringfence.backends import Container

def refused(policy):
    try:
        return Sandbox(backend=Container(engine="podman"), policy=policy).plan().backend
    except ringfence.UnsupportedError as error:
        return str(error)

much = os.urandom(1 << 20) * 4
with Sandbox(backend=Container(engine="podman"), policy=Policy(limits=ringfence.Limits(output="8M"))) as box:
    back = box.exec(["cat"], stdin=much)
    held = box.enforcement
    alone = box.exec(["sh", "-c", "cat /proc/self/uid_map; id -un; touch /usr/x 2>/dev/null || echo closed"]).stdout
    said = {
        "whole": back.stdout_bytes == much,
        "value": box.run("6 * 7").value,
        "inside": alone.split(),
        "memory": [held.memory.mechanism, held.memory.level],
        "weaker": list(held.weaker),
        "peak": back.usage.memory_peak_bytes,
        "limit": box.exec(["sh", "-c", "ulimit -d"]).stdout.strip(),
    }
said["strict"] = refused(Policy(strict=True))
print(json.dumps(said))
