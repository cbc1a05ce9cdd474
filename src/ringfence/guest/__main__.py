"""What the launcher starts: `python -I -S …/ringfence/guest/__main__.py`. Only our own package is importable yet."""

import gc
import os
import sys

gc.disable()  # until everything is loaded
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ringfence.guest.zygote import main  # noqa: E402  # after the path is set

main()
