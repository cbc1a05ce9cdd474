import ctypes
mmap = ctypes.CDLL(None).mmap
top = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[25]) & ~4095  # where the stack began
def put_a_file_there(depth):
    if depth:  # C frames, so that those in the page stand still meanwhile
        return sorted([depth - 1], key=put_a_file_there)
    with open("top", "w+b") as file:
        file.write(ctypes.string_at(top, 4096)); file.flush()
        mmap(ctypes.c_void_p(top), ctypes.c_size_t(4096), 3, 0x12, file.fileno(), ctypes.c_long(0))
    return []
done = put_a_file_there(40)
