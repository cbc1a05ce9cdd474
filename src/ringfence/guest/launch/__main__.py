"""What the launcher starts, as `python -I -S …/guest/launch/__main__.py`. Only our own package is importable yet."""

import gc
import os
import sys

gc.disable()  # until everything is loaded
# The folder our package lies in may hold other things, a guest's too (L12): it is asked once, after Python's own.
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
import ringfence.guest  # noqa: E402, F401  # after the path is set

sys.path.pop()
from ringfence.guest.launch.zygote import main  # noqa: E402  # as above

main()
