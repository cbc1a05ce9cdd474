import sys, warnings
warnings.simplefilter("ignore")
from ringfence import Mount, Policy, Sandbox
with Sandbox(policy=Policy(mounts=[Mount(sys.argv[1], target="/workspace", mode="copy")])) as box:
    box.exec(["rm", "-f", "token", "changed"]).check()
    listing = ["sh", "-c", "find . -type f -printf '%P %m %s\n' -o -printf '%P %y %m\n' | sort"]
    with box.fork(memory=False) as twin:
        print(twin.exec(listing).stdout == box.exec(listing).stdout, "token" not in twin.exec(["ls"]).stdout, end=" ")
    before, shown = box.snapshot(), box.exec(listing).stdout
    box.exec(["rm", "-f", "kept/later", "first"]).check()
    box.rollback(before)
    print(box.exec(listing).stdout == shown)
