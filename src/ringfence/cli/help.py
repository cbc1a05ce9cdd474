"""Hold the help texts, word for word. Imported only when help is asked for."""

from __future__ import annotations

from ringfence.backends import registry

_BACKENDS = ", ".join(("auto", *registry.names()))

TEXTS: dict[str, str] = {
    "": """\
ringfence: run untrusted code in a sandbox

usage: ringfence VERB [OPTIONS] ...

run something
  run       a piece of code: a file, -c CODE, or standard input
  exec      a command
  shell     an interactive shell

trust it
  doctor    what this host can enforce, and the fix for what it cannot
  attack    try to break out of a sandbox here, and print what held

prepare it
  policy    check, explain, print and list policies
  image     list, build, import, export and remove images

  ringfence VERB --help      options of a verb
  ringfence help exit        what each exit code means
  ringfence --version

By default a sandbox has no network and sees nothing of this machine but the
programs of its image. No option runs code outside a sandbox.
""",
    "exit": """\
run, exec, shell: the exit code of what ran, and
  124   time limit: --timeout, or [limits] timeout_s
  125   ringfence itself: bad option or policy, host cannot keep the policy,
        image missing, sandbox lost. Nothing ran, or its end is not known
  126   the program is there but may not be run
  127   no such program inside
  128+N it died of signal N
  130   you pressed Ctrl-C
  137   memory limit (or SIGKILL of its own)
A guest can exit with these numbers too. --json and --report tell which it was:
their "status" and "reason" come from outside the guest.

all other verbs
  0     done; doctor: the policy can be kept; attack: all held
  1     not so: doctor, attack, policy check
  2     bad option or argument
  3     attack: nothing got through, but a case was inconclusive
  125   ringfence itself failed

Messages of ringfence start with "ringfence:" and go to standard error. They
say what happened, to what, and the command that fixes it. With --json they are
{"error": {"code": ..., "message": ..., "fix": ...}} on standard output.
""",
    "run": """\
usage: ringfence run [OPTIONS] FILE [ARG...]
       ringfence run [OPTIONS] -c CODE [ARG...]
       ringfence run [OPTIONS] -              code from standard input

Run a piece of code in a fresh sandbox. Limits of the policy "offline": 30 s,
512M, 1 CPU, no network, none of this machine's files. Of FILE's folder only
FILE itself goes in; show the rest with --ro.

  -c, --code CODE       the code itself
  -l, --language NAME   python, javascript, bash, go, ruby, java, c, c++, r;
                        default: by FILE's ending, else python

Sandbox options: ringfence exec --help. They are the same for run and shell.

examples
  ringfence run -c 'print(6 * 7)'
  ringfence run --ro data.csv analyse.py data.csv
  ringfence run --timeout 5 --memory 256M --json untrusted.py
  curl ... | ringfence run --language bash -

A command? ringfence exec -- npm test
""",
    "exec": """\
usage: ringfence exec [OPTIONS] [--] COMMAND [ARG...]

Run a command in a fresh sandbox, with the limits of the policy "dev": 1 h, 4G,
4 CPUs. It starts in this folder if that, or something in it, is shown inside;
else in /workspace.

what is shown (default: no host files, no network, no variables)
  --ro PATH[:DST]       a host path, read-only, at its own path or at DST
  --rw PATH[:DST]       the same, writable
  --copy PATH[:DST]     the same, writable inside; the host's files stay
  --hide PATH           absent inside a shown folder, such as .env
  --allow-net HOST[:PORT]   reachable: a.com, *.a.com, a.com:8443, or public
  --deny-net HOST       never reachable, whatever --allow-net says
  --secret NAME@HOST[,HOST]   the host's variable NAME: a placeholder inside,
                        the value only in requests to HOST
  -e, --env NAME[=VALUE]    a variable; without VALUE, the host's
how much it may use
  --timeout S  --memory SIZE  --limit KEY=VALUE (cpus=2, disk=1G, ...)
how
  -p, --policy NAME|FILE    offline, dev, hostile, one of yours, or a .toml
  -b, --backend NAME    {backends}
  -i, --image NAME      host, or one of "ringfence image list"
  --isolation LEVEL     weakest isolation accepted: runtime,
                        shared-kernel, own-kernel
  --strict              refuse limits that a weaker mechanism enforces
  -C, --cwd PATH        the folder to start in
  -t, --tty             on a terminal: editors, coding agents, progress bars
what you get
  --json                one result object instead of the output
  --report FILE         the same object in FILE, the output as it is
  --net-log FILE        each connection as a JSON line
  --explain             print the plan, run nothing
  --raw                 keep all terminal escapes (default: colours only)
  -q, --quiet           no notes about denials on standard error
""".replace("{backends}", _BACKENDS),
    "shell": """\
usage: ringfence shell [OPTIONS] [COMMAND [ARG...]]

An interactive shell, or COMMAND, on a terminal in a fresh sandbox: colours,
job control, line editing. Leaving it removes the sandbox; your terminal is
left as it was.

  --keep NAME           save the files as snapshot NAME when it ends
  --from NAME           start from snapshot NAME

Sandbox options: ringfence exec --help.

examples
  ringfence shell --copy .            try things on a copy of this folder
  ringfence shell --rw . --allow-net public --image node
""",
    "doctor": """\
usage: ringfence doctor [BACKEND...] [OPTIONS]

Say which backends work here, what enforces each limit, what "auto" would take,
and the command that fixes what is missing. Every line was tried, not guessed:
a namespace counts when a mount inside it worked.

  -p, --policy NAME|FILE    check this policy (default: offline)
  --fix                 print the fixes as a shell script, change nothing;
                        read it, then: ringfence doctor --fix | sudo sh
  --json                everything, for machines

Exit code 0: some backend keeps the policy. 1: none does.
""",
    "attack": """\
usage: ringfence attack [ID...] [OPTIONS]

Run Ringfence's own escape attempts on this host, each with its control off
(where it must succeed) and on (where it must fail), judged from outside.
Bounded in processes, memory and time; nothing leaves this machine.

  ID                    A01, G07, ... or a letter: A files, B proc, C races,
                        D processes, E kernel, F exhaustion, G network, H leaks,
                        I secrets, J spoofing, K archives, L persistence,
                        M container engines, O the host's own process
  -b, --backend NAME    default: every backend that works here
  --list                names and what must be true, run nothing
  --json

Exit code 0: all held. 1: one got through. 3: a case was inconclusive.
""",
    "policy": """\
usage: ringfence policy check FILE
       ringfence policy explain NAME|FILE
       ringfence policy show [NAME|FILE] [SANDBOX OPTIONS]
       ringfence policy list

  check     parse FILE and report every mistake with its line
  explain   the policy in sentences
  show      print TOML: a preset, or what the given options add up to
  list      presets, and yours in ~/.config/ringfence/policies

  --json    check, explain, list

examples
  ringfence policy show dev
  ringfence policy show --rw . --allow-net api.example.com \\
      > ~/.config/ringfence/policies/shop.toml
  ringfence exec --policy shop -- npm test

A policy is used where it is named. None is picked up from a working directory.
""",
    "image": """\
usage: ringfence image list
       ringfence image build NAME [RECIPE.toml | --preset PRESET]
       ringfence image import NAME SOURCE
       ringfence image inspect NAME
       ringfence image export NAME FILE
       ringfence image remove NAME...
       ringfence image gc

  build     a Debian root from a recipe; presets: python, data, node, polyglot
  import    SOURCE: a folder, a tar, a docker-save or OCI archive, or
            docker:NAME, podman:NAME from a running engine
  gc        drop layers that no image uses

  --json    list, inspect
  --no-cache            build
  --yes                 remove, gc: do not ask

"host", the default image, is this machine's programs and the Python that runs
ringfence with its packages, read-only. Nothing else of the home folder.
""",
}
