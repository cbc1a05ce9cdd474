"""Hold a secret, and abort so that a core file would be left.

coredump_code.py control      without a sandbox
coredump_code.py kept         with a sandbox that has the secret
coredump_code.py dumped       the same, dumped by a tool that does not ask for the limit, as gcore
coredump_code.py unstarted    only a policy that is checked, a sandbox that is never started and a vault
"""

import os
import resource
import sys

from ringfence import Network, Policy, Sandbox, Secret
from ringfence.gateway.rules import check_network
from ringfence.gateway.secrets.vault import Vault

(arm,) = sys.argv[1:]
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0x33")  # the kernel's own: our starter may hold a secret, and then ours would be 0 too
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
value = "-".join(["core", "canary", str(os.getppid())]) * 2
secret = Secret("TOKEN", value, hosts=["a.test"])
policy = Policy(network=Network(allow=["a.test"]), secrets=[secret])
if arm == "unstarted":
    check_network(policy)
    Sandbox(policy=policy)
    Vault([secret])
    with open("/proc/self/coredump_filter") as file:
        print(resource.getrlimit(resource.RLIMIT_CORE) == (hard, hard), int(file.read(), 16) == 0x33)
    sys.exit()
if arm != "control":
    with Sandbox(policy=policy) as box:
        assert box.exec(["printenv", "TOKEN"]).stdout.startswith("rf-secret-")
if arm == "dumped":
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
os.abort()
