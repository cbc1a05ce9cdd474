import json, os, sys
from ringfence.host import programs as host_programs
os.chdir("/")
top = os.environ["HOME"] = os.path.expanduser("~/rf-host-programs")
os.makedirs(top + "/mine", exist_ok=True)
for name in ("rf-test-own", "sh"):
    open(f"{top}/mine/{name}", "w").close()
    os.chmod(f"{top}/mine/{name}", 0o755)
os.environ["PATH"] = f"{top}/mine:/usr/bin:/bin"
own = host_programs.find("rf-test-own")
host_programs.note_writable([top])
print(json.dumps([own, host_programs.find("sh"), host_programs.look_up("rf-test-own").remark]))
