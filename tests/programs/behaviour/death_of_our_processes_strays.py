import os, time
from ringfence.guest.guestd import supervisor as inside
from ringfence.guest.launch import monitor
from ringfence.shared import fast_stdlib as lean
class Starting:
    '''A sandbox whose spawner owes an answer.'''
    expects_children = True
    def __init__(self): self.expects_since = inside.boot_time()
    def pidfds(self): return []
def ended():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid
def is_there(pid):
    return os.path.exists(f"/proc/{pid}")
served = monitor.Monitor(*(lean.pair(lean.SOCK_SEQPACKET)), 0, os.pidfd_open(os.getpid()))
older = ended()
time.sleep(0.03)
served._boxes[1] = Starting()
younger = ended()
served.reap_strays()
print(is_there(older), is_there(younger))
served._boxes[2] = served._boxes.pop(1)
served._boxes[2].expects_children = False
served.reap_strays()
print(is_there(older), is_there(younger))
