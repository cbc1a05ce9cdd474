"""The languages that run once from source text: the name of the source file, the compiler, the command.

A new language is a new row. Words of a command may hold {file}, {folder}, {out} and {name}.
"""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.values import Struct, final

SESSIONS = ("python", "javascript", "bash")  # languages whose sessions keep state; all others run once


@final
class Language(Struct):
    """A language.

    `package` is the Debian package with the tools; `image` names a preset whose images have the package.
    """

    name: str
    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    package: str = ""
    image: str = ""
    env: tuple[tuple[str, str], ...] = ()

    def named_for(self, code: str) -> str:
        """Return the file's name without the ending. For Java the name has to be that of the public class."""
        return _java_class(code) if self.name == "java" else self.file.partition(".")[0]


@final
class Commands(Struct):
    """How to compile and run one piece of code below `folder`. `compile` is empty where nothing is compiled."""

    path: str
    compile: tuple[str, ...]
    run: tuple[str, ...]
    env: dict[str, str]


_TABLE = (
    Language("python", "main.py", ("python3", "{file}"), package="python3", image="python"),
    Language("javascript", "main.js", ("node", "{file}"), package="nodejs", image="node"),
    Language("bash", "main.sh", ("bash", "{file}"), package="bash"),
    Language(
        "go",
        "main.go",
        ("{out}",),
        ("go", "build", "-o", "{out}", "{file}"),
        package="golang-go",
        image="polyglot",
        env=(("GOCACHE", "{folder}/cache"), ("GOPATH", "{folder}/go"), ("GOFLAGS", "-buildvcs=false")),
    ),
    Language("ruby", "main.rb", ("ruby", "{file}"), package="ruby", image="polyglot"),
    Language(
        "java",
        "Main.java",
        ("java", "-cp", "{folder}", "{name}"),
        ("javac", "-d", "{folder}", "{file}"),
        package="default-jdk-headless",
    ),
    Language("c", "main.c", ("{out}",), ("gcc", "-O1", "-o", "{out}", "{file}", "-lm"), "gcc", "polyglot"),
    Language("c++", "main.cpp", ("{out}",), ("g++", "-O1", "-o", "{out}", "{file}"), "g++", "polyglot"),
    Language("r", "main.R", ("Rscript", "{file}"), package="r-base-core"),
)
TABLE = {language.name: language for language in _TABLE}


def find(name: object) -> Language:
    """Return a language by its name. Raise PolicyError, which lists the known names."""
    if isinstance(name, str) and name in TABLE:
        return TABLE[name]
    if name == "wasm":
        fix = f"use one of: {', '.join(TABLE)}"
        raise PolicyError("the language wasm is not in this version", code="language", fix=fix)
    raise PolicyError(f"unknown language {name!r}", code="language", fix=f"one of: {', '.join(TABLE)}")


def commands(language: Language, code: str, folder: str, path: str | None = None) -> Commands:
    """Return the commands for `code` in a new folder inside. `path`: where the file is already."""
    name = language.named_for(code)
    ending = language.file.rpartition(".")[2]
    file = path or f"{folder}/{name}.{ending}"
    words = {"file": file, "folder": folder, "out": f"{folder}/{name}", "name": name}
    return Commands(
        file,
        tuple(word.format_map(words) for word in language.compile),
        tuple(word.format_map(words) for word in language.run),
        {key: value.format_map(words) for key, value in language.env},
    )


def image_with(program: str) -> str | None:
    """Return, in words, which image has the tools of a language. Return None for any other program."""
    for language in _TABLE:
        if program in (*language.compile[:1], *language.run[:1]):
            preset = f"built from the preset {language.image!r}"
            return preset if language.image else f"with the Debian package {language.package!r}"
    return None


def _java_class(code: str) -> str:
    import re

    plain = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", code, flags=re.DOTALL)
    found = re.search(
        r"\bpublic\s+(?:(?:final|abstract|sealed)\s+)*(?:class|record|enum|interface)\s+(\w{1,100})", plain
    )
    found = found or re.search(r"\bclass\s+(\w{1,100})", plain)
    return found[1] if found and found[1].isascii() else "Main"
