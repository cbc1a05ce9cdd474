import json, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence import Limits, Policy, Sandbox
with Sandbox(policy=Policy(limits=Limits(memory="1G"))) as box:  # for Node 24, where there is no cgroup
    for language, first, second in (("javascript", "const x = 1", "console.log(x, prompt())"),
                                    ("bash", "x=1; cd /tmp", "read y; echo $x $y $PWD")):
        box.run(first, language=language).check()
        print(json.dumps(box.run(second, language=language, stdin="in\n").stdout))
        r = box.run("while (true) {}" if language == "javascript" else "sleep 60", language=language, timeout_s=0.5)
        print(json.dumps([r.status, r.state_kept]))
r = ringfence.run("int main(void) { return 6; }", language="c")
print(json.dumps([r.status, r.exit_code]))
