from ringfence.cli import main
from ringfence.errors import SandboxLostError
get, asked = pool.Templates.get, []
def fails_first(self, plan):
    asked.append(plan)
    if len(asked) == 1:
        raise SandboxLostError("not yet")
    return get(self, plan)
pool.Templates.get = fails_first
spawn.begin()
print(main(["exec", "--", "/bin/true"]), len(asked))
