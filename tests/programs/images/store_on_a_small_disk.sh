mount -t tmpfs -o size=1500k tmpfs "$1" && XDG_DATA_HOME="$1" exec "$2" -c '
import os, sys
from ringfence import images
from ringfence.errors import ImageError
from ringfence.images import make as making
making._RESERVE = -(1 << 40)  # past the first check: the disk is full in the middle
try:
    images.import_image("one", sys.argv[1])
except ImageError as error:
    print(error.code, "nothing was kept" in str(error), "gc" in error.fix)
print(sorted(os.listdir(images.directory() + "/work")), os.listdir(images.directory() + "/trees"))
' "$3"
