mount -t tmpfs -o size=64m,nr_inodes=0 tmpfs "$1" && XDG_DATA_HOME="$1" exec "$2" -c '
import os, sys
from ringfence import images
from ringfence.errors import ImageError
from ringfence.images import make as making
making._RESERVE = 32 << 20
lowest, remove = [], making.ImageWorkplace.__exit__
def leaving(self, *how):
    found = os.statvfs(self.scratch)
    lowest.append(found.f_bavail * found.f_frsize)
    return remove(self, *how)
making.ImageWorkplace.__exit__ = leaving
try:
    images.import_image("one", sys.argv[1])
except ImageError as error:
    print(error.code, lowest[0] > 12 << 20)
' "$3"
