from ringfence.backends.process.zygote import Zygote
from ringfence.plan.rootfs.interpreter import interpreter
class Tree:
    moves_zygotes = True
    def adopt(self, pid):
        print(children())
        raise KeyboardInterrupt
try:
    Zygote(interpreter(), (), Tree())
except KeyboardInterrupt:
    print(children())
