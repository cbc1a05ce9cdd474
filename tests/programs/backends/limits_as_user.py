import json, os, tempfile, warnings
warnings.simplefilter("ignore")
from ringfence import Mount, Policy, Sandbox, UnsupportedError
with Sandbox(backend="gvisor") as box:
    said = box.exec(["sh", "-c", "id -un; echo 1 > x; cat x; cat /etc/shadow; touch /x"])
    told = {"stdout": said.stdout, "value": box.run("6 * 7").value, "file": box.files.read_text("x")}
told["refused"] = []
with tempfile.TemporaryDirectory(dir=os.path.expanduser("~")) as folder:
    for policy in (Policy.preset("hostile"), Policy(mounts=[Mount(folder, "/data", "rw")])):
        try:
            Sandbox(policy=policy, backend="gvisor").plan()
        except UnsupportedError as error:
            told["refused"].append(error.code)
print(json.dumps(told))
