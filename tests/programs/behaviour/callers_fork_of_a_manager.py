import os, sys
from ringfence import SandboxClosedError, SandboxManager
with SandboxManager(state=state) as manager:
    agent = manager.environment("a")
    agent.run("open('f', 'w').write('parent')")
    waits, goes_on = os.pipe()
    if os.fork() == 0:
        uses = [lambda: agent.run("open('f', 'w').write('child')"), lambda: agent.files.write("f", "child"),
                agent.remove, agent.sandbox, manager.sandbox, lambda: manager.environment("a")]
        for use in uses:
            try: print("used", use())
            except SandboxClosedError as e: print("belongs to process" in str(e), e.fix)
        sys.stdout.flush()
        os.close(goes_on)
        os.read(waits, 1)
        sys.exit(0)
    os.close(waits)
    print(agent.run("open('f').read()").value)
with SandboxManager(state=state) as manager:  # while the fork lives
    print(manager.environment("a").run("open('f').read()").value)
os.close(goes_on)
os.wait()
print(os.path.exists(f"{state}/agent-a/workspace.snapshot"))
