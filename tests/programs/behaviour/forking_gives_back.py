import ctypes, gc, sys
gc.unfreeze()  # what the zygote has
held = [each for one in gc.get_objects() for each in gc.get_referents(one)]
held += [each for one in held if type(one) is dict for each in one.values()]  # such a dict of texts is not tracked
texts = [each for each in held if type(each) is str]
text = max(texts, key=sys.getsizeof)
assert sys.getsizeof(text) > 2 * 4096 + 64
page = (id(text) + 64 + 4095) & ~4095  # all of it is inside the text
full = bool(ctypes.string_at(page, 4096).strip(b"\0"))
ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(4096), 4)  # MADV_DONTNEED
del held, texts
full
