import sys, warnings
from ringfence import Quota, QuotaError, SandboxManager, WeakerLimitWarning
warnings.simplefilter("ignore", WeakerLimitWarning)
for turn in range(2):
    with SandboxManager(state=sys.argv[1], quota=Quota(sandboxes=1), warm=1) as manager:
        agent = manager.environment("a")
        print(agent.run("open('f', 'a').write('x')\nopen('f').read()").value)
        try: agent.sandbox().start()
        except QuotaError as error: print(error.code)
manager = SandboxManager(state=sys.argv[1])
manager.environment("a").remove()
print(manager.environments())
manager.close()
