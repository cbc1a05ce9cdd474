import os, sys, time
top, here = sys.argv[1:]
sys.path.insert(0, here)
import ringfence
from ringfence import Image, Mount, Policy, Sandbox
with Sandbox(policy=Policy(mounts=[Mount(here, mode="rw")])) as box:
    box.exec(["python3", "-c", PLANT, here]).check()
    assert box.exec(["sh", "-c", f"echo 1 >> {here}/ringfence/spawn.py"]).exit_code
    assert Sandbox(image=Image("host", preload=["json"])).start().run("import json; json.dumps(1)").value == "'1'"
    from ringfence.doctor import process as trials
    assert trials.make_cgroup().facts is not None
    assert trials.run_trials()["launcher"].ok
    assert os.path.exists(here + "/.vscode")
    os.kill(os.getpid(), 9)
