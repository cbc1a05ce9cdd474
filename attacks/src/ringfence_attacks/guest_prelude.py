"""The text put before every guest script of an attack: raw system calls, and a line of JSON for each attempt.

It runs inside the sandbox, or outside where the off arm is a plain process. What it reports is not taken as evidence.
"""

PRELUDE = r'''
import ctypes, errno, json, os, sys, time
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
AT_FDCWD = -100

def tell(**said):
    """Write a line for the host: what an attempt met, or bytes that were stolen."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()

def call(number, *args):
    """Make a raw system call, every integer as a whole word. Raises OSError."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result

def attempt(name, function, *args, **kwargs):
    """Call `function` and report the errno it met, or "ok". Returns the result, or None after an error."""
    try:
        result = function(*args, **kwargs)
    except OSError as error:
        tell(tried=name, met=errno.errorcode.get(error.errno, str(error.errno)))
        return None
    except Exception as error:
        tell(tried=name, met=type(error).__name__)
        return None
    tell(tried=name, met="ok")
    return result

def slurp(path, size=1 << 16):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)

def spill(path, text, flags=0):
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        return os.write(fd, text.encode() if isinstance(text, str) else text)
    finally:
        os.close(fd)

def loot(data):
    """Report bytes that the guest should not have seen; the host looks for its canary in them."""
    tell(loot=data.decode("latin-1") if isinstance(data, bytes) else str(data))

def steal(path, name=None):
    data = attempt(name or path, slurp, path)
    if data is not None:
        loot(data)

'''
