import os, sys, time
from ringfence import images
def say(message): print(message, flush=True)
from ringfence.images.tree import ImageTree
whole = ImageTree._add_file
def slow(self, *rest):
    whole(self, *rest)
    print("wrote", flush=True)
    time.sleep(30)
ImageTree._add_file = slow
images.import_image("one", sys.argv[1])
