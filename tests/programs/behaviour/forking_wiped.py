import mmap, os
def made():
    found = mmap.mmap(-1, 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.madvise(18)  # MADV_WIPEONFORK: where libraries, and libc since 2.41, keep the state of their generators
    return found
def seen_by_a_child(page):
    out, into = os.pipe()
    if os.fork() == 0:
        os.write(into, page[:4])
        os._exit(0)
    os.wait(); os.close(into)
    return os.read(out, 4)
state = made()
state[:4] = b"seed"
plain = mmap.mmap(-1, 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
plain[:4] = b"kept"
