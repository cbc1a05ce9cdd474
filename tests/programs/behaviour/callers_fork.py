import os, sys, time
import ringfence
from ringfence import SandboxError
box = ringfence.Sandbox().start()
p = box.spawn(["sh", "-c", "echo up; cat"])
next(iter(p))
ringfence.run("1")
pid = os.fork()
if pid == 0:
    code = 1
    try:
        for use in (lambda: box.run("1"), lambda: box.files.read("x"), lambda: box.exec(["ls"]), lambda: box.usage()):
            try:
                use()
                print("child used the parent's sandbox")
            except SandboxError as e:
                print(type(e).__name__, "belongs to process" in str(e), e.fix)
        print(box.state)
        box.close()
        p.kill()
        print("child", ringfence.run("6 * 7").value)
        with ringfence.Sandbox() as own:
            print("child", own.exec(["echo", "own"]).stdout.strip())
        sys.stdout.flush()
        code = 0
    finally:
        HOW
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
p.write("still here"); p.close_stdin()
print(p.wait().stdout.split())
print(box.exec(["echo", "parent"]).stdout.strip(), ringfence.run("2").value)
box.close()
