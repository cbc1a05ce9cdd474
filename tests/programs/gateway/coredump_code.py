import os, resource, sys
from ringfence import Network, Policy, Sandbox, Secret
arm = sys.argv[1]
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0x33")  # the kernel's own: who starts us may hold a secret, and then ours would be 0 too
soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
value = "-".join(["core", "canary", str(os.getppid())]) * 2
secret = Secret("TOKEN", value, hosts=["a.test"])
if arm != "control":
    policy = Policy(network=Network(allow=["a.test"]), secrets=[secret])
    with Sandbox(policy=policy) as box:
        assert box.exec(["printenv", "TOKEN"]).stdout.startswith("rf-secret-")
if arm == "dumped":  # by a tool that does not ask for the limit, as gcore
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
os.abort()
