import ringfence, sys, time
from ringfence.backends.process import pool
WHAT
print("go", flush=True)
started = time.monotonic()
try:
    CALL
    print("returned")
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - started < 10)
THEN
