import os, sys, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence.shared import syscalls as kernel
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
kernel.mount("ramfs", sys.argv[1], "ramfs", 0)
try:
    policy = ringfence.Policy(mounts=[ringfence.Mount(sys.argv[1], "/m", mode="rw")])
    ringfence.run("1", backend="process", policy=policy)
except ringfence.UnsupportedError as error:
    print(error)
