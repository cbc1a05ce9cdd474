import sys
source, engine, socket = sys.argv[1:]
sys.path.insert(0, source)
import ringfence
from ringfence.backends import Container
assert ringfence.run("print(1)", backend=Container(engine, socket)).stdout == "1\n"
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "ringfence"))
