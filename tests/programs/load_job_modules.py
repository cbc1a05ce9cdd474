"""Load what jobs need, then import modules again while no file of ours can be opened, as in a sandbox."""

import sys

root, how, *names = sys.argv[1:]
sys.path.insert(0, root)

from ringfence.guest import job_modules  # noqa: E402  # from the folder that was named

getattr(job_modules, how)()


def refuse(event: str, args: "tuple[object, ...]") -> None:
    """Let no file of ours be opened; after `load_late` none at all."""
    if event == "open" and (how == "load_late" or str(args[0]).startswith(root)):
        raise AssertionError(f"{args[0]} was opened")


sys.addaudithook(refuse)
for name in names:
    __import__(name)
if how == "load_late":
    import fnmatch  # noqa: F401  # a job's own late imports
    import re  # noqa: F401  # the same
    import zipfile  # noqa: F401  # the same
print(len(names), "modules")
