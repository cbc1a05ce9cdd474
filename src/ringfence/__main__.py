"""Run the `ringfence` command as a process: prepare the process before the command line is read, and end it.

`python -P -m ringfence` comes here too.
"""

# No import of __future__: `python -m` would take it from the working directory (L12). These three are loaded already.
import gc
import os
import sys

_INSTALLED = ("site-packages", "dist-packages")
GUEST_VERBS = ("run", "exec", "shell")  # verbs whose exit codes below 125 are the guest's


def main() -> int:
    """Run the process's own command line and return its exit code."""
    gc.disable()  # until a guest runs: a start makes many objects and throws none away
    leave_out_working_folders()
    _fill_closed_descriptors()
    _begin(sys.argv[1:])
    from ringfence.cli import main as run_line

    try:
        code = run_line(sys.argv[1:])
    finally:
        from ringfence.cli.launch import die_of_interrupts

        die_of_interrupts()
    _leave(code)
    return code


def leave_out_working_folders() -> None:
    """Remove from `sys.path` every folder where the last guest may have written (L12).

    This process runs no code but our own. The entries of Python's own library come first. An entry in the working
    directory is left out, and an entry of PYTHONPATH that `untouched` does not vouch for.
    """
    library = os.path.dirname(os.__file__)
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = [entry for entry in sys.path if entry == library or os.path.dirname(entry) == library]
    here = _working_folder()
    rest = [entry for entry in sys.path if entry not in own and os.path.isabs(entry)]
    sys.path[:] = own + [
        entry
        for entry in rest
        if entry == ours or os.path.basename(entry) in _INSTALLED or not f"{os.path.realpath(entry)}/".startswith(here)
    ]
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry in sys.path]
    asked = [entry for entry in named if entry != ours and os.path.basename(entry) not in _INSTALLED]
    if asked and not sys.flags.ignore_environment:
        left = sys.path[:]
        sys.path[:] = [entry for entry in left if entry not in asked]  # also while `untouched` is imported and looks
        from ringfence.host.programs import untouched

        used = untouched(asked)
        sys.path[:] = [entry for entry in left if entry not in asked or entry in used]


def _working_folder() -> str:
    """Return the working directory with a slash at its end, or a NUL for `/`, which no guest can have been shown."""
    try:
        here = os.getcwd()
    except OSError:  # another process removed it
        here = "/"
    return "\0" if here == "/" else f"{here}/"


def _fill_closed_descriptors() -> None:
    """Open /dev/null in place of a closed standard stream.

    Without this, after `>&-` the next opened file would be number 1, and the guest's output would go into that file.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _begin(words: list[str]) -> None:
    """Start the zygote early where `words` will run something: its start takes as long as that of the command."""
    if (
        sys.platform != "linux"
        or not words
        or words[0] not in GUEST_VERBS
        or {"--help", "-h", "--explain"} & set(words[1:])
    ):
        return
    from ringfence.host.zygote_start import begin

    has_options = words[1:] and words[1] != "--" and words[1].startswith("-")
    begin(program=words[0] == "exec" and not has_options)


def _leave(code: int) -> None:
    """End the process at once when a zygote can clean up: the interpreter's own end would take as long again."""
    from ringfence.host import state, zygote_start

    if not zygote_start.is_command():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    state.close()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
