"""The program that the launcher starts: `python -I -S …/guest/launch/__main__.py`. It can import only our package."""

import gc
import os
import sys

gc.disable()  # until everything is loaded
# The package's folder may hold other modules, even a guest's (L12): it is used once, after Python's own folders.
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
import ringfence.guest  # noqa: E402, F401  # after the path is set

sys.path.pop()
from ringfence.guest.launch.zygote import main  # noqa: E402  # as above

main()
