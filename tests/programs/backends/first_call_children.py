import os, sys, time, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence import Mount, Policy, Sandbox
from ringfence.host import zygote_start as spawn
from ringfence.backends.process import pool

def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())

def until(done):
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done()
