import json, os, sys
sys.path.append(SDK)
os.environ["DOCKER_HOST"] = HOST
os.environ["PATH"] = PATH
import ringfence
if PATH == "/nowhere":
    from ringfence.host import programs as host_programs
    host_programs.SYSTEM_FOLDERS = ()
from ringfence import Limits, Policy, Sandbox
from ringfence.doctor import examine

def tell(work):
    try:
        return work()
    except ringfence.RingfenceError as error:
        return [type(error).__name__, error.code, str(error), error.fix]

def planned():
    box = Sandbox(**options())
    box._launcher.preflight()
    plan = box.plan()
    return [plan.backend, dict(plan.rejected)]

def ran():
    with Sandbox(**options()) as box:
        first = [box.backend, box.exec(["id", "-un"]).stdout]
    return [*first, ringfence.run("print(6 * 7)", **options()).stdout]

report = examine(policy(), ["process"])
doctor = [report.auto, dict(report.rejected)]
print(json.dumps({"plan": tell(planned), "run": tell(ran), "plan after": tell(planned), "doctor": doctor}))
