import os, sys
with open(WITNESS, "a") as file:
    file.write(f"{__name__} {os.getpid()}\n")
here = os.path.dirname(__file__)
place = sys.path.index(here)
del sys.path[place], sys.modules[__name__]
import importlib
try:
    sys.modules[__name__] = importlib.import_module(__name__)
finally:
    sys.path.insert(place, here)
