import os, tempfile, warnings
warnings.simplefilter("ignore")
from ringfence import Mount, Policy, Sandbox
with tempfile.TemporaryDirectory() as host:
    os.chmod(host, 0o755)
    open(f"{host}/of-the-host", "w").close()
    with Sandbox(policy=Policy(mounts=[Mount(host, "/workspace/a/b/m", mode="rw")])) as box:
        box.files.write("mine", "1")
        before = box.snapshot()
        box.run("import os; os.rename('a', 'z'); os.remove('mine')").check()
        box.rollback(before)
        print(box.files.exists("mine"), os.path.exists(f"{host}/of-the-host"), oct(os.stat(host).st_mode & 0o777))
        before.delete()
