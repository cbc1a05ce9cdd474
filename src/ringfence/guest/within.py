"""What a box that somebody else walled starts: `python -I -S …/ringfence/guest/within.py`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ringfence.guest.alone import main  # after the path is set

main()
